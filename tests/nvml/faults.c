/* How every call begins: it is counted, and the faults file says what befalls it. */

#include "traced.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { INIT = -1, ANY = -2, MAX_FAULTS = 256 };

struct fault {
    char line[256], call[32];
    int target;
    enum verb { ERROR, VALUE, RESET, LOST, HANG, DELAY, SPIN, SERIAL, FREEZE, BACK, JUMP, EVENT, NUM_VERBS } verb;
    double number, from_s, until_s;
    int spent; /* a hang or an event, which happens once */
};

static const char *const verbs[NUM_VERBS] = {"error", "value",  "reset", "lost", "hang", "delay",
                                             "spin",  "serial", "freeze", "back",  "jump", "event"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[MAX_FAULTS];
static int num_faults, calls_file = -1;
static char faults_path[4096];
static struct stat seen;

double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void sleep_s(double seconds)
{
    struct timespec time = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    while (nanosleep(&time, &time) != 0)
        continue;
}

/* --- counting ------------------------------------------------------------------------------------- */

/* Finds out which files the environment names. */
void find_files(void)
{
    const char *trace = getenv("NVML_TRACE"), *calls = getenv("NVML_TRACE_CALLS");
    snprintf(faults_path, sizeof faults_path, "%s.faults", trace ? trace : "");
    if (calls && *calls && calls_file < 0)
        calls_file = open(calls, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

void count_call(const char *function)
{
    char line[96];
    if (calls_file < 0 || !function)
        return;
    int length = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), function);
    if (write(calls_file, line, (size_t)length) < 0)
        abort();
}

/* --- the faults file ------------------------------------------------------------------------------ */

static int parse_fault(const char *line, struct fault *fault)
{
    char target[16], verb[16];
    memset(fault, 0, sizeof *fault);
    fault->until_s = INFINITY;
    snprintf(fault->line, sizeof fault->line, "%s", line);
    if (sscanf(line, "%15s %31s %15s %lf %lf %lf", target, fault->call, verb, &fault->number, &fault->from_s,
               &fault->until_s) < 3)
        return 0;
    while (fault->verb < NUM_VERBS && strcmp(verbs[fault->verb], verb) != 0)
        fault->verb++;
    fault->target = strcmp(target, "init") == 0 ? INIT : strcmp(target, "*") == 0 ? ANY : atoi(target);
    return fault->verb < NUM_VERBS;
}

/* Reads the faults file where it is another than the one that was read last. */
static void refresh(void)
{
    static struct fault before[MAX_FAULTS];
    struct stat found;
    if (stat(faults_path, &found) != 0)
        memset(&found, 0, sizeof found);
    if (found.st_ino == seen.st_ino && found.st_size == seen.st_size &&
        found.st_mtim.tv_sec == seen.st_mtim.tv_sec && found.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    seen = found;
    int num_before = num_faults;
    char line[256];
    memcpy(before, faults, sizeof before);
    num_faults = 0;
    FILE *file = fopen(faults_path, "r");
    while (file && num_faults < MAX_FAULTS && fgets(line, sizeof line, file)) {
        struct fault *fault = &faults[num_faults];
        if (!parse_fault(line, fault))
            continue;
        for (int i = 0; i < num_before; i++)
            fault->spent |= before[i].spent && strcmp(before[i].line, fault->line) == 0;
        num_faults++;
    }
    if (file)
        fclose(file);
}

/* Whether a word names a call: "power" does so for power.instant.gpu too. */
static int names(const char *word, size_t length, const char *call)
{
    if (length == 1 && *word == '*')
        return 1;
    return strncmp(word, call, length) == 0 && (call[length] == '\0' || call[length] == '.');
}

static int is_listed(const char *list, const char *call)
{
    while (*list) {
        size_t length = strcspn(list, ",");
        if (length && names(list, length, call))
            return 1;
        list += length + (list[length] == ',');
    }
    return 0;
}

static int concerns(const struct fault *fault, int target, const char *call, double t)
{
    if (t < fault->from_s || t >= fault->until_s || !names(fault->call, strlen(fault->call), call))
        return 0;
    if (target == INIT || fault->target == INIT)
        return target == fault->target;
    return fault->target == target || fault->target == ANY ||
           (fault->verb == LOST && fault->target == devices[target].parent);
}

/* Sleeps in a lock of all processes with this trace, like a call of a driver that serves one process at a time. */
static void take_turn(double seconds)
{
    char path[sizeof faults_path + 8];
    snprintf(path, sizeof path, "%s.lock", faults_path);
    int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (file >= 0)
        flock(file, LOCK_EX);
    sleep_s(seconds);
    if (file >= 0)
        close(file);
}

/* What the faults file says of one call on one target, and the time that it takes. */
static int look_up(int target, const char *call, struct effect *effect)
{
    double t = now_s(), asleep_s = 0, busy_s = 0, serial_s = 0;
    int result = SUCCESS, is_frozen = 0;
    memset(effect, 0, sizeof *effect);
    effect->t_s = t;
    pthread_mutex_lock(&lock);
    refresh();
    for (struct fault *fault = faults; fault < faults + num_faults; fault++) {
        if (!concerns(fault, target, call, t))
            continue;
        switch (fault->verb) {
        case ERROR:
            result = (int)fault->number;
            break;
        case VALUE:
            effect->has_value = 1, effect->value = fault->number;
            break;
        case RESET:
            effect->has_reset = t >= fault->number, effect->reset_s = fault->number;
            break;
        case LOST:
            if (target >= 0)
                devices[target].lost = 1;
            break;
        case HANG:
            asleep_s += fault->spent ? 0 : fault->number, fault->spent = 1;
            break;
        case DELAY:
            asleep_s += fault->number;
            break;
        case SPIN:
            busy_s += fault->number;
            break;
        case SERIAL:
            serial_s += fault->number;
            break;
        case FREEZE:
            is_frozen = 1, effect->t_s = fault->number;
            break;
        case BACK:
        case JUMP:
            effect->offset_j += fault->verb == JUMP ? fault->number : -fault->number;
            break;
        case EVENT:
        case NUM_VERBS:
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    if (asleep_s > 0)
        sleep_s(asleep_s);
    if (serial_s > 0)
        take_turn(serial_s);
    while (busy_s > 0 && now_s() < t + asleep_s + serial_s + busy_s)
        continue;
    if ((asleep_s > 0 || serial_s > 0 || busy_s > 0) && !is_frozen)
        effect->t_s = now_s();
    return result;
}

int enter_init(void)
{
    struct effect effect;
    return look_up(INIT, "*", &effect);
}

/* Every call on a device begins here; function is NULL for a part of a call. */
int enter(const char *function, struct device *device, const char *call, struct effect *effect)
{
    struct effect unused;
    count_call(function);
    if (!initialized)
        return UNINITIALIZED;
    if (device < devices || device >= devices + num_devices)
        return INVALID_ARGUMENT;
    int result = look_up((int)(device - devices), call, effect ? effect : &unused);
    if (device->lost)
        return GPU_IS_LOST;
    if (result == SUCCESS && is_listed(device->unsupported, call))
        return NOT_SUPPORTED;
    return result;
}

/* And every call that a slice does not have. */
int enter_whole(const char *function, struct device *device, const char *call, struct effect *effect)
{
    int result = enter(function, device, call, effect);
    return result == SUCCESS && device->parent >= 0 ? NOT_SUPPORTED : result;
}

/* The next event that is due on a device that is registered, by position, since a time (or -1: is not). */
int take_event(const double *registered_s, struct event *event)
{
    int is_found = 0;
    double t = now_s();
    pthread_mutex_lock(&lock);
    refresh();
    for (struct fault *fault = faults; fault < faults + num_faults && !is_found; fault++) {
        if (fault->verb != EVENT || fault->spent || t < fault->from_s)
            continue;
        for (int i = 0; i < num_devices && !is_found; i++) {
            int is_meant = fault->target == i || fault->target == ANY;
            int is_heard = registered_s[i] >= 0 && (fault->from_s == 0 || fault->from_s >= registered_s[i]);
            if (is_meant && is_heard) {
                *event = (struct event){i, (unsigned long long)fault->number};
                fault->spent = is_found = 1;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    return is_found;
}
