"""Which files of a repository something outside a sandbox runs later, by their names: a table and how it is read.

In: a path. Out: what kind of thing it is and who runs it, or None. Nothing is opened here. A row says who acts on a
file, and lists patterns:

    NAME       a file of that name in any directory; `*` stands for anything but a slash
    DIR/       everything below a directory of that name
    DIR/NAME   that file in such a directory
    /...       any of these, but only at the top of the repository

File systems may fold what git tells apart: letter case (macOS, Windows), characters that do not show (HFS+), dots and
blanks at the end of a name, backslashes and what follows a colon (Windows). `folded` does the same before names are
compared, so that `.VSCode/tasks.json` is found as well.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

# In the order in which they are shown: first what acts without being asked.
KINDS = ("link", "name", "git", "hook", "shell", "editor", "agent", "ci", "submodule", "package", "build", "program")

ROWS: tuple[tuple[str, str, str], ...] = (
    ("hook", "git runs hooks from here where it is set up to", ".husky/ .githooks/ .git-hooks/ githooks/ .hooks/"),
    (
        "hook",
        "says what runs when you commit or push",
        ".pre-commit-config.yaml .pre-commit-config.yml .pre-commit-hooks.yaml lefthook.* .lefthook.* lefthook-local.* "
        ".lefthook-local.* .lefthook/ .lefthook-local/ .overcommit.yml .simple-git-hooks.* simple-git-hooks.* "
        ".lintstagedrc* lint-staged.config.* captainhook.json .huskyrc* husky.config.*",
    ),
    (
        "shell",
        "the shell loads it when you enter the directory",
        ".envrc .envrc.* .autoenv .autoenv.zsh .autoenv_leave.zsh .env.fish .mise.toml mise.toml .mise.*.toml "
        "mise.*.toml .mise/ .config/mise.toml .config/mise/ .rtx.toml .tool-versions",
    ),
    ("shell", "programs take their variables from it", ".env .env.*"),
    ("shell", "describes the shell that nix, devbox or devenv opens", "*.nix flake.lock devbox.json devenv.yaml"),
    ("editor", "Visual Studio Code starts tasks and programs from it", ".vscode/ *.code-workspace"),
    ("editor", "the container your editor opens is made and started by it", ".devcontainer/ .devcontainer.json"),
    (
        "editor",
        "JetBrains editors start tasks and programs from it",
        ".idea/runConfigurations/ .idea/workspace.xml .idea/tools/ .idea/startup.xml .idea/watcherTasks.xml "
        ".idea/externalTools.xml .idea/externalDependencies.xml .run/ .fleet/",
    ),
    (
        "editor",
        "an editor obeys it when it opens a file here",
        ".vimrc .exrc .nvimrc .nvim.lua .lvimrc .gvimrc .vim/ .nvim/ .dir-locals.el .dir-locals-2.el .zed/ .helix/ "
        ".kakrc .lite_project.lua *.sublime-project .theia/ .nova/ .projectile",
    ),
    (
        "agent",
        "coding agents take settings, commands and hooks from it",
        ".claude/ .cursor/ .gemini/ .codex/ .qwen/ .opencode/ opencode.json opencode.jsonc .windsurf/ .roo/ .kilocode/ "
        ".continue/ .goose/ .openhands/ .devin/ .amp/ .junie/ .kiro/ .crush/ crush.json .crush.json .factory/ "
        ".augment/ .agents/ .agent/ .copilot/ .aider.conf.yml .mcp.json mcp.json .github/agents/ .github/hooks/",
    ),
    (
        "agent",
        "coding agents read it as instructions",
        "CLAUDE.md CLAUDE.local.md AGENTS.md AGENTS.override.md AGENT.md GEMINI.md QWEN.md CRUSH.md WARP.md "
        ".cursorrules .windsurfrules .clinerules .clinerules/ .roorules .goosehints .rules "
        ".github/copilot-instructions.md .github/instructions/ .github/prompts/ .github/chatmodes/",
    ),
    ("agent", "sandbox-cli reads it: what the next run may do", ".sandbox.yaml .sandbox.yml"),
    ("ci", "GitHub Actions runs it", "/.github/workflows/ .github/actions/ action.yml action.yaml"),
    ("ci", "Gitea or Forgejo runs it", "/.gitea/workflows/ /.forgejo/workflows/"),
    ("ci", "GitLab CI runs it", ".gitlab-ci.yml *.gitlab-ci.yml *.gitlab-ci.yaml /.gitlab/ci/"),
    ("ci", "CircleCI runs it", "/.circleci/"),
    ("ci", "Jenkins runs it", "Jenkinsfile Jenkinsfile.* *.jenkinsfile"),
    ("ci", "Azure Pipelines runs it", "azure-pipelines*.yml azure-pipelines*.yaml .azure-pipelines/ .azuredevops/"),
    ("ci", "Buildkite runs it", ".buildkite/ buildkite.yml"),
    ("ci", "Travis CI runs it", "/.travis.yml"),
    ("ci", "Drone runs it", ".drone.yml .drone.yaml .drone.star .drone.jsonnet"),
    ("ci", "Woodpecker runs it", "/.woodpecker/ .woodpecker.yml .woodpecker.yaml"),
    ("ci", "Bitbucket Pipelines runs it", "/bitbucket-pipelines.yml"),
    (
        "ci",
        "a build service runs it",
        "/.teamcity/ appveyor.yml .appveyor.yml .cirrus.yml .cirrus.star /.semaphore/ wercker.yml codefresh.yml "
        "cloudbuild.yaml cloudbuild.yml cloudbuild.json buildspec.yml buildspec.yaml /.tekton/ /.harness/ /.build.yml "
        "/.builds/ .gitpod.yml .gitpod.Dockerfile .readthedocs.yaml .readthedocs.yml netlify.toml vercel.json "
        "render.yaml amplify.yml Procfile .platform.app.yaml .copr/ .packit.yaml .onedev-buildspec.yml bitrise.yml "
        "codemagic.yaml .sourcehut.yml .scrutinizer.yml",
    ),
    (
        "package",
        "npm, yarn, pnpm, bun or deno obey it",
        ".npmrc .yarnrc .yarnrc.yml .yarnrc.yaml .yarn/releases/ .yarn/plugins/ .pnpmfile.cjs .pnpmfile.mjs "
        "pnpm-workspace.yaml bunfig.toml .pnp.cjs .pnp.loader.mjs deno.json deno.jsonc lerna.json nx.json turbo.json",
    ),
    (
        "package",
        "says which packages are installed, and from where: their scripts run",
        "requirements*.txt requirements/ constraints*.txt package-lock.json npm-shrinkwrap.json yarn.lock "
        "pnpm-lock.yaml bun.lock bun.lockb deno.lock Pipfile.lock poetry.lock uv.lock pdm.lock pylock.toml "
        "pylock.*.toml Cargo.lock Gemfile.lock Podfile.lock composer.lock go.mod go.sum mix.lock",
    ),
    (
        "package",
        "Python runs it, or tools take commands from it",
        "setup.py setup.cfg pyproject.toml conftest.py tox.ini noxfile.py tasks.py dodo.py fabfile.py pytest.ini "
        "sitecustomize.py usercustomize.py *.pth pip.conf pip.ini uv.toml pdm.toml hatch.toml Pipfile manage.py "
        "pythonstartup.py .pdbrc .pythonrc .pylintrc pylintrc",
    ),
    (
        "package",
        "cargo or rustup obey it",
        "build.rs .cargo/config.toml .cargo/config rust-toolchain rust-toolchain.toml Cargo.toml",
    ),
    (
        "package",
        "Ruby tools run it",
        "Gemfile Rakefile *.rake *.gemspec Guardfile Capfile Dangerfile Fastfile Podfile Brewfile Vagrantfile "
        "config.ru .irbrc .pryrc .rspec .bundle/config",
    ),
    ("package", "composer obeys it", "composer.json"),
    ("package", "mix or rebar runs it", "mix.exs rebar.config rebar.config.script .iex.exs .formatter.exs"),
    (
        "package",
        "Gradle, Maven, Ant or sbt runs it",
        "build.gradle build.gradle.kts settings.gradle settings.gradle.kts init.gradle init.gradle.kts *.gradle "
        "*.gradle.kts gradle.properties gradlew gradlew.bat gradle/wrapper/ buildSrc/ pom.xml mvnw mvnw.cmd .mvn/ "
        "build.xml build.sbt project/plugins.sbt build.sc build.mill .sbtopts .jvmopts",
    ),
    (
        "package",
        "the compiler's build runs it",
        "Package.swift build.zig *.csproj *.fsproj *.vbproj *.vcxproj *.proj *.targets Directory.Build.props "
        "Directory.Packages.props nuget.config global.json build.cake *.nimble config.nims stack.yaml Setup.hs "
        "dune project.pbxproj *.xcscheme *.xcconfig Project.toml go.work .golangci.yml",
    ),
    (
        "build",
        "make, just, task or another tool runs it",
        "Makefile GNUmakefile makefile.* *.mk *.mak justfile .justfile *.just Taskfile.yml Taskfile.yaml "
        "Taskfile.dist.yml Taskfile.dist.yaml Earthfile Tiltfile skaffold.yaml SConstruct SConscript wscript waf "
        "premake5.lua xmake.lua magefile.go configure configure.ac configure.in autogen.sh bootstrap bootstrap.sh "
        "meson.build meson_options.txt BUILD BUILD.bazel WORKSPACE WORKSPACE.bazel MODULE.bazel *.bzl .bazelrc "
        "CMakeLists.txt *.cmake CMakePresets.json CMakeUserPresets.json Snakefile dvc.yaml",
    ),
    (
        "build",
        "tools of JavaScript projects run it",
        "*.config.js *.config.cjs *.config.mjs *.config.ts *.config.cts *.config.mts gulpfile.* Gruntfile.* "
        # Those that are JSON or YAML name plugins, which may be files of the repository.
        "babel.config.json jest.config.json .eslintrc* .prettierrc* .babelrc* .mocharc* .stylelintrc* .postcssrc* "
        ".nycrc* .swcrc .commitlintrc* .releaserc* karma.conf.* wdio.conf.* .storybook/ Jakefile jakefile.js "
        "angular.json",
    ),
    (
        "build",
        "containers are built or started from it",
        "Dockerfile Dockerfile.* *.dockerfile Containerfile Containerfile.* compose.yml compose.yaml compose.*.yml "
        "compose.*.yaml docker-compose*.yml docker-compose*.yaml docker-bake.hcl docker-bake.json .dockerignore "
        "devfile.yaml",
    ),
    (
        "build",
        "tools that deploy or configure machines run it",
        "*.tf *.tofu terragrunt.hcl .terraformrc *.pkr.hcl ansible.cfg playbook.yml serverless.yml Pulumi.yaml "
        "cdk.json helmfile.yaml",
    ),
)  # fmt: skip

STREAM = re.compile(r":[^/]*")
ENDING = re.compile(r"[. ]+(?=/|$)")
PLAIN = re.compile(r"[!-9;-\[\]-~]*")  # ASCII without a blank, a colon and a backslash


class Fit(NamedTuple):
    """`kind` is one of KINDS, `reason` who acts on such a file."""

    kind: str
    reason: str


class _Pattern(NamedTuple):
    order: int
    parts: tuple[str, ...]
    top: bool
    fit: Fit


def folded(path: str) -> str:
    """The path as a forgiving file system takes it."""
    if PLAIN.fullmatch(path):
        lower = path.lower()
        return ENDING.sub("", lower) if "./" in lower or lower.endswith(".") else lower
    shown = "".join(char for char in unicodedata.normalize("NFC", path) if unicodedata.category(char) != "Cf")
    return ENDING.sub("", STREAM.sub("", shown.casefold().replace("\\", "/")))


def fit(path: str) -> Fit | None:
    """Who runs the file at `path`, which is relative to the top of the repository; None for nobody known."""
    parts = tuple(folded(path).split("/"))
    best: _Pattern | None = None
    for position, part in enumerate(parts[:-1]):
        for pattern in _DIRECTORIES.get(part, ()):
            if (best is None or pattern.order < best.order) and _fits(pattern, parts[: position + 1]):
                best = pattern
    for pattern in _FILES.get(parts[-1], ()):
        if (best is None or pattern.order < best.order) and _fits(pattern, parts):
            best = pattern
    wild = _WILD.fullmatch(parts[-1])
    if wild and wild.lastgroup:
        order = int(wild.lastgroup[1:])
        if best is None or order < best.order:
            return Fit(*ROWS[order][:2])
    return best.fit if best else None


def link_fit(path: str) -> Fit | None:
    """Like `fit`, of a symbolic link: what it leads to may be a directory that runs, or holds what does."""
    if found := fit(path) or fit(f"{path}/_"):
        return found
    parts = tuple(folded(path).split("/"))
    holding = [pattern for pattern in _HOLDERS.get(parts[-1], ()) if _fits(pattern, parts)]
    return min(holding, key=lambda pattern: pattern.order).fit if holding else None


def _fits(pattern: _Pattern, parts: tuple[str, ...]) -> bool:
    """Whether `parts` end as the pattern says."""
    return parts[-len(pattern.parts) :] == pattern.parts and (not pattern.top or len(parts) == len(pattern.parts))


def _read() -> tuple[dict[str, list[_Pattern]], dict[str, list[_Pattern]], re.Pattern[str]]:
    directories: dict[str, list[_Pattern]] = {}
    files: dict[str, list[_Pattern]] = {}
    wild = []
    for order, (kind, reason, patterns) in enumerate(ROWS):
        stars = []
        for written in patterns.lower().split():
            if "*" in written:
                stars.append(".*".join(re.escape(piece) for piece in written.split("*")))
                continue
            parts = tuple(written.strip("/").split("/"))
            where = directories if written.endswith("/") else files
            pattern = _Pattern(order, parts, written.startswith("/"), Fit(kind, reason))
            where.setdefault(parts[-1], []).append(pattern)
        if stars:
            wild.append(f"(?P<r{order}>{'|'.join(stars)})")
    return directories, files, re.compile("|".join(wild), re.DOTALL)


_DIRECTORIES, _FILES, _WILD = _read()
# The directories in which a pattern of several parts is looked for, by their last part.
_HOLDERS: dict[str, list[_Pattern]] = {}
for _pattern in (one for table in (_DIRECTORIES, _FILES) for patterns in table.values() for one in patterns):
    for _length in range(1, len(_pattern.parts)):
        _above = _pattern.parts[:_length]
        _HOLDERS.setdefault(_above[-1], []).append(_pattern._replace(parts=_above))
