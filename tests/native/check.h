/* CHECK counts and says what failed and where; `finish` is the exit status of the test program. */

#include <stdio.h>

static int checks_done, checks_failed;

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        checks_done++;                                                      \
        if (!(condition)) {                                                 \
            checks_failed++;                                                \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
        }                                                                   \
    } while (0)

static int finish(const char *name)
{
    printf("%s: %d checks, %d failed\n", name, checks_done, checks_failed);
    return checks_failed ? 1 : 0;
}
