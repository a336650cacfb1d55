# A client of the API in another language, written from the API's specification alone: Perl and its core modules.
# Usage: outsider.pl SOCKET. Dies with what is not as specified; prints the steps that passed.
use strict;
use warnings;
use IO::Socket::UNIX;
use JSON::PP;
use MIME::Base64;
use Digest::SHA qw(sha256_hex);
use File::Temp qw(tempdir);

my $socket = shift or die "usage: outsider.pl SOCKET\n";
my $json   = JSON::PP->new->utf8;
my $steps  = 0;
$SIG{ALRM} = sub { die "the server is silent\n" };
alarm 240;

sub dial {
    return IO::Socket::UNIX->new(Peer => $socket) || die "cannot connect: $!\n";
}

sub send_head {
    my ($sock, $method, $path, @fields) = @_;
    print $sock join("\r\n", "$method $path HTTP/1.1", "Host: localhost", @fields, "", "");
    $sock->flush;
}

sub read_head {
    my ($sock) = @_;
    my ($status, %fields);
    do {
        my $line = <$sock>;
        defined $line && $line =~ m{^HTTP/1\.1 (\d{3}) } or die "no answer\n";
        ($status, %fields) = ($1);
        while (defined($line = <$sock>) && $line ne "\r\n") {
            $line =~ /^([^:]+):\s*(.*?)\r\n$/ or die "a bad header: $line";
            $fields{lc $1} = $2;
        }
    } while ($status == 100);
    return ($status, \%fields);
}

sub take {
    my ($sock, $size) = @_;
    my $data = "";
    while (length $data < $size) {
        read($sock, $data, $size - length $data, length $data) or die "the answer broke off\n";
    }
    return $data;
}

# One request on a connection of its own: (status, body, header fields). A body that is a reference becomes JSON.
sub call {
    my ($method, $path, $body) = @_;
    my $sock   = dial();
    my @fields = ("Connection: close");
    if (defined $body) {
        my $type = ref $body ? "application/json" : "application/octet-stream";
        $body = $json->encode($body) if ref $body;
        push @fields, "Content-Type: $type", "Content-Length: " . length $body;
    }
    send_head($sock, $method, $path, @fields);
    print $sock $body if defined $body;
    $sock->flush;
    my ($status, $told) = read_head($sock);
    my $answer = "";
    if (($told->{"transfer-encoding"} // "") eq "chunked") {
        while ((my $size = hex <$sock> =~ s/\r\n//r) > 0) {
            $answer .= take($sock, $size);
            take($sock, 2);
        }
    }
    elsif ($told->{"content-length"}) {
        $answer = take($sock, $told->{"content-length"});
    }
    return ($status, $answer, $told);
}

sub equal {
    my ($what, $got, $wanted) = @_;
    my $said = $json->canonical->allow_nonref;
    my ($one, $other) = map { ref $_ || !defined $_ ? $said->encode($_) : $_ } $got, $wanted;
    $one eq $other or die "$what: $one, not $other\n";
}

sub wants {
    my ($status, $method, $path, $body) = @_;
    my ($got, $answer, $told) = call($method, $path, $body);
    equal("$method $path ($answer)", $got, $status);
    return $answer if $answer eq "" || $told->{"content-type"} ne "application/json";
    my $value = $json->decode($answer);
    equal("content of $method $path", join(",", keys %$value), "error") if $status >= 400;
    return $value;
}

sub refused {
    my ($status, $code, @request) = @_;
    my $error = wants($status, @request)->{error};
    equal("the code of $request[1]", $error->{code}, $code);
    length $error->{message} or die "no message: $request[1]\n";
}

# Exactly these fields, and perhaps those.
sub fields {
    my ($what, $value, $always, $perhaps) = @_;
    my %known = map { $_ => 1 } @$always, @{ $perhaps // [] };
    exists $value->{$_} or die "$what lacks $_\n" for @$always;
    $known{$_} or die "$what has $_\n" for keys %$value;
}

sub upgrade {
    my ($path, $protocol) = @_;
    my $sock = dial();
    send_head($sock, "GET", $path, "Connection: Upgrade", "Upgrade: $protocol");
    my ($status, $told) = read_head($sock);
    equal("upgrade of $path", $status, 101);
    equal("Upgrade",    $told->{upgrade},        $protocol);
    equal("Connection", lc $told->{connection}, "upgrade");
    return $sock;
}

sub frame {
    my ($kind, $payload) = (@_, "");
    return pack("aN/a*", $kind, $payload);
}

# Frames up to the exit code, after which the connection ends: what came by kind, and the code.
sub frames {
    my ($sock) = @_;
    my %came = (o => "", E => "");
    while (1) {
        my ($kind, $size) = unpack("aN", take($sock, 5));
        my $payload = $size ? take($sock, $size) : "";
        if ($kind eq "x") {
            equal("bytes behind the exit code", read($sock, my $more, 1), 0);
            return (\%came, unpack("l>", $payload));
        }
        exists $came{$kind} or die "a frame of kind $kind\n";
        $came{$kind} .= $payload;
    }
}

sub step {
    my ($name, $act) = @_;
    eval { $act->(); 1 } or die "$name: $@";
    $steps++;
}

step "what the server is" => sub {
    equal("health", wants(200, "GET", "/v1/health"), { status => "ok" });
    my $told = wants(200, "GET", "/v1/capabilities");
    fields("capabilities", $told, [qw(api_version backend capabilities limits network)], [qw(lacking)]);
    equal("api_version", $told->{api_version}, "v1");
    JSON::PP::is_bool($told->{capabilities}{$_}) or die "$_ is no boolean\n"
        for qw(network_policy_update suspend memory_snapshot audit);
    refused(404, "not_found", "GET", "/v1/whoami");
};

my ($box, $ref);
step "create" => sub {
    fields("a volume", wants(201, "POST", "/v1/volumes", { name => "kept", size_mb => 16 }), [qw(name size_mb created_at)]);
    my $asked = {
        name => "outside", env => { API_TOKEN => "s3cr3t" }, labels => { who => "perl" }, lifetime_secs => 900,
        volumes => [{ name => "kept", path => "/data" }],
    };
    $box = wants(201, "POST", "/v1/sandboxes", $asked);
    fields(
        "a sandbox", $box, [qw(id name state image cpus memory_mb disk_mb env_names network created_at
            idle_timeout_secs lifetime_secs expires_at labels volumes)],
    );
    $box->{id} =~ /^sbx_[0-9a-f]{16}$/ or die "id $box->{id}\n";
    equal("state",     $box->{state},     "running");
    equal("env_names", $box->{env_names}, ["API_TOKEN"]);
    exists $box->{network}{allow} or die "network.allow is left out\n";
    $ref = "/v1/sandboxes/outside";
    equal("by $_", wants(200, "GET", "/v1/sandboxes/$_"), $box) for $box->{id}, "outside";
    equal("listed", wants(200, "GET", "/v1/sandboxes?label=who=perl")->{sandboxes}, [$box]);
    equal("not listed", wants(200, "GET", "/v1/sandboxes?label=who=ruby"), { sandboxes => [] });
    refused(409, "conflict",        "POST", "/v1/sandboxes", { name => "outside" });
    refused(400, "invalid_request", "POST", "/v1/sandboxes", { nonsense => 1 });
    refused(403, "refused",         "POST", "/v1/sandboxes", { env => { LD_PRELOAD => "x" } });
};

step "run" => sub {
    my $argv = ["sh", "-c", 'cat; printenv API_TOKEN; echo oops >&2; exit 3'];
    my $told = wants(200, "POST", "$ref/run", { argv => $argv, stdin => encode_base64("in\n", ""), cwd => undef });
    fields("a result", $told, [qw(exit_code stdout stderr truncated timed_out)]);
    equal("exit_code", $told->{exit_code}, 3);
    equal("stdout", decode_base64($told->{stdout} // ""), "in\ns3cr3t\n");
    equal("stderr", decode_base64($told->{stderr} // ""), "oops\n");
    my $late = wants(200, "POST", "$ref/run", { argv => ["sleep", "60"], timeout_secs => 1 });
    equal("a timeout", [@$late{qw(exit_code timed_out)}], [-1, JSON::PP::true]);
    refused(400, "invalid_request", "POST", "$ref/run", { argv => ["no-such-command"] });
};

step "a process, its input and its output" => sub {
    my $told = wants(201, "POST", "$ref/processes", { argv => ["cat"] });
    fields("a process", $told, [qw(pid argv state exit_code started_at)]);
    equal("exit_code", $told->{exit_code}, undef);
    my $at = "$ref/processes/$told->{pid}";
    wants(204, "POST", "$at/stdin", "one\n");
    wants(204, "POST", "$at/stdin?close=1", "two\n");
    for (1, 2) {
        my ($status, $body, $fields) = call("GET", "$at/output");
        equal("type of output", $fields->{"content-type"}, "application/x-ndjson");
        my @lines = map { $json->decode($_) } split /\n/, $body;
        equal("the last line", pop @lines, { exit_code => 0 });
        fields("a line", $_, [qw(stream data)]) for @lines;
        equal("output", join("", map { decode_base64($_->{data}) } @lines), "one\ntwo\n");
    }
    refused(409, "conflict", "POST", "$at/stdin", "late");
    my $sleep = wants(201, "POST", "$ref/processes", { argv => ["sleep", "60"] })->{pid};
    refused(400, "invalid_request", "POST", "$ref/processes/$sleep/signal", { signal => "STOP" });
    wants(204, "POST", "$ref/processes/$sleep/signal", { signal => "TERM" }) for 1, 2;
    my (undef, $ended) = call("GET", "$ref/processes/$sleep/output");
    equal("after TERM", $json->decode($ended), { exit_code => 143 });
};

step "attach, drop, attach again" => sub {
    my $pid = wants(201, "POST", "$ref/processes", { argv => ["sh", "-c", "echo E >&2; cat; exit 7"] })->{pid};
    my $at  = "$ref/processes/$pid/attach";
    my $first = upgrade($at, "sbx-stream/1");
    print $first frame("i", "hello\n");
    $first->flush;
    take($first, 5);
    close $first;
    equal("state", wants(200, "GET", "$ref/processes/$pid")->{state}, "running");
    my $second = upgrade($at, "sbx-stream/1");
    print $second frame("s", "WINCH"), frame("i", "more\n"), frame("e");
    $second->flush;
    for my $sock ($second, upgrade($at, "sbx-stream/1")) {
        my ($came, $code) = frames($sock);
        equal("frames", [$came->{o}, $came->{E}, $code], ["hello\nmore\n", "E\n", 7]);
    }
    refused(400, "invalid_request", "GET", $at);
};

step "files" => sub {
    my $data = join "", map { chr(rand 256) } 1 .. 200_000;
    my $path = "/tmp/outside%20of/it";
    wants(204, "PUT", "$ref/files?path=$path", $data);
    wants(200, "GET", "$ref/files?path=$path") eq $data or die "other bytes came back\n";
    my $entries = [{ name => "it", type => "file", size => 200_000 }];
    equal("listing", wants(200, "GET", "$ref/dirs?path=/tmp/outside%20of"), { entries => $entries });
    refused(409, "conflict", "DELETE", "$ref/files?path=/tmp/outside%20of");
    wants(204, "DELETE", "$ref/files?path=$_") for $path, "/tmp/outside%20of";
    refused(404, "not_found", "GET", "$ref/files?path=$path");
    refused(400, "invalid_request", "GET", "$ref/files?path=$_") for "relative", "/a/../b", "/a%00b", "", "/tmp";
};

step "a tunnel to a server, whichever family it is on" => sub {
    for my $host ("127.0.0.1", "::1") {
        my $server = 'import socket, sys; f = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET' . "\n"
            . 's = socket.socket(f); s.bind((sys.argv[1], 0)); s.listen(); print(s.getsockname()[1], flush=True)' . "\n"
            . 'c = s.accept()[0]; b = b""' . "\n"
            . 'while d := c.recv(9): b += d' . "\n" . 'c.sendall(b[::-1])';
        my $pid = wants(201, "POST", "$ref/processes", { argv => ["python3", "-c", $server, $host] })->{pid};
        my $told = upgrade("$ref/processes/$pid/attach", "sbx-stream/1");
        my (undef, $size) = unpack("aN", take($told, 5));
        my $port = take($told, $size) + 0;
        my $tunnel = upgrade("$ref/tunnel?port=$port", "sbx-tunnel/1");
        print $tunnel "a request";
        $tunnel->flush;
        shutdown $tunnel, 1;
        equal("the answer of $host", join("", <$tunnel>), reverse("a request") . "");
        refused(400, "invalid_request", "GET", "$ref/tunnel?port=$port");
    }
};

step "a bundle in and out" => sub {
    my $dir = tempdir(CLEANUP => 1);
    local @ENV{qw(GIT_CONFIG_GLOBAL GIT_CONFIG_NOSYSTEM)} = ("/dev/null", 1);
    my $git = "git -C $dir -c user.name=a -c user.email=a\@b";
    system("$git init -q && echo 1 > $dir/f && $git add f && $git commit -qm one && $git bundle create -q $dir/in HEAD")
        and die "git failed\n";
    chomp(my $base = `$git rev-parse HEAD`);
    open my $in, "<:raw", "$dir/in" or die $!;
    my $bundle = do { local $/; <$in> };
    refused(400, "invalid_request", "POST", "$ref/workspace?branch=a..b", $bundle);
    wants(204, "POST", "$ref/workspace?branch=work", $bundle);
    refused(409, "conflict", "GET", "$ref/workspace/bundle?base=$base&branch=work");
    my $change = 'echo 2 >> f && git -c user.name=a -c user.email=a@b commit -qam two';
    my $done = wants(200, "POST", "$ref/run", { argv => ["sh", "-c", $change], cwd => "/workspace" });
    equal("a commit (" . decode_base64($done->{stderr} // "") . ")", $done->{exit_code}, 0);
    open my $out, ">:raw", "$dir/out" or die $!;
    print $out wants(200, "GET", "$ref/workspace/bundle?base=$base&branch=work");
    close $out;
    equal("heads", `$git bundle list-heads $dir/out | wc -l` + 0, 1);
    system("$git fetch -q $dir/out work:back") and die "git does not take it\n";
    equal("log", scalar `$git log --format=%s back`, "two\none\n");
};

step "changes" => sub {
    refused(400, "invalid_request", "PATCH", $ref, {});
    my $told = wants(200, "PATCH", $ref, { labels => {}, idle_timeout_secs => 120 });
    equal("labels are left out", exists $told->{labels} ? 1 : 0, 0);
    equal("idle_timeout_secs", $told->{idle_timeout_secs}, 120);
};

step "the end, and what is known of it" => sub {
    refused(409, "conflict", "DELETE", "/v1/volumes/kept");
    wants(204, "DELETE", $ref) for 1, 2;
    equal("state", wants(200, "GET", $ref)->{state}, "terminated");
    refused(409, "conflict", "POST", "$ref/run", { argv => ["true"] });
    my ($status, $events) = call("GET", "/v1/sandboxes/$box->{id}/events");
    equal("events", $status, 200);
    $events =~ /s3cr3t/ and die "an event tells a value of the environment\n";
    my @all = @{ $json->decode($events)->{events} };
    equal("first and last", [map { $_->{type} } @all[0, -1]], [qw(sandbox.created sandbox.terminated)]);
    my ($sleep) = grep { ($_->{program} // "") eq "sleep" } @all;
    equal("args_sha256", $sleep->{args_sha256}, sha256_hex("60\0"));
    wants(204, "DELETE", "/v1/volumes/kept");
    refused(404, "not_found", "DELETE", "/v1/volumes/kept");
};

print "$steps steps passed\n";
