/* An NVML whose devices follow known curves, so that everything above it runs through the real pynvml.
 *
 * The file named by NVML_TRACE has one device a line, in the order of NVML's indices:
 *
 *     device uuid=GPU-... bus=00000000:3B:00.0 name=Traced memory_total=85899345920 power_limit_w=700
 *         power=square:100:300:2:0.5 memory=flat:1e9 utilization=flat:0.5 tick_s=0.1 unsupported=energy,power
 *     slice parent=0 uuid=MIG-... memory_total=...
 *
 * (each on one line).  Curves are functions of CLOCK_MONOTONIC: flat:VALUE, square:LOW:HIGH:PERIOD:DUTY
 * (high first) and sine:LOW:HIGH:PERIOD (upwards first).  Units are W, bytes and 0..1.
 *
 * The file of the same name with ".faults" behind it is read anew at every call, one fault a line:
 *
 *     TARGET CALL VERB [NUMBER [FROM [UNTIL]]]
 *
 * TARGET is a position in the trace, "init" or "*"; CALL is memory, utilization, power, energy, limit,
 * uuid, name, pci or "*"; FROM and UNTIL are monotonic seconds.  The verbs: "error N" returns NVML's error
 * N, "value N" gives that raw number, "reset T" lets the energy counter start from 0 at T, and "lost"
 * takes the device away until NVML is initialised anew.
 */

#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
};

enum { FIELD_TOTAL_ENERGY = 83, FIELD_POWER_AVERAGE = 185, FIELD_POWER_INSTANT = 186, MAX_DEVICES = 64 };

struct curve {
    enum { FLAT, SQUARE, SINE } shape;
    double low, high, period_s, duty;
};

struct device {
    int parent; /* -1: a whole GPU */
    char uuid[96], bus[32], name[96], unsupported[128];
    unsigned long long memory_total;
    double power_limit_w, tick_s;
    struct curve power, memory, utilization;
    int lost;
};

struct fault {
    int has_value, has_reset;
    double value, reset_s;
};

/* The structures of nvml.h, as far as they are used. */
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned int version; unsigned long long total, reserved, free, used; };
struct utilization { unsigned int gpu, memory; };
struct pci {
    char bus_legacy[16];
    unsigned int domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
};
struct field {
    unsigned int id, scope;
    long long timestamp_us, latency_us;
    unsigned int value_type;
    int result;
    union { double d; unsigned int ui; unsigned long long ull; } value;
};

static struct device devices[MAX_DEVICES];
static int num_devices, initialized;

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double at(const struct curve *curve, double t)
{
    if (curve->shape == FLAT)
        return curve->low;
    if (curve->shape == SQUARE)
        return fmod(t, curve->period_s) < curve->duty * curve->period_s ? curve->high : curve->low;
    return (curve->low + curve->high) / 2 + (curve->high - curve->low) / 2 * sin(2 * M_PI * t / curve->period_s);
}

static double integral(const struct curve *curve, double t)
{
    if (curve->shape == FLAT)
        return curve->low * t;
    if (curve->shape == SQUARE) {
        double whole = floor(t / curve->period_s), rest = t - whole * curve->period_s;
        double high_s = whole * curve->duty * curve->period_s + fmin(rest, curve->duty * curve->period_s);
        return curve->high * high_s + curve->low * (t - high_s);
    }
    double turn = 2 * M_PI / curve->period_s;
    return (curve->low + curve->high) / 2 * t + (curve->high - curve->low) / 2 * (1 - cos(turn * t)) / turn;
}

/* --- the trace ------------------------------------------------------------------------------------ */

static void parse_curve(struct curve *curve, const char *text)
{
    memset(curve, 0, sizeof *curve);
    curve->shape = strncmp(text, "square", 6) == 0 ? SQUARE : strncmp(text, "sine", 4) == 0 ? SINE : FLAT;
    sscanf(strchr(text, ':') + 1, "%lf:%lf:%lf:%lf", &curve->low, &curve->high, &curve->period_s, &curve->duty);
}

static void parse_setting(struct device *device, const char *key, const char *value)
{
    if (strcmp(key, "uuid") == 0)
        snprintf(device->uuid, sizeof device->uuid, "%s", value);
    else if (strcmp(key, "bus") == 0)
        snprintf(device->bus, sizeof device->bus, "%s", value);
    else if (strcmp(key, "name") == 0)
        snprintf(device->name, sizeof device->name, "%s", value);
    else if (strcmp(key, "unsupported") == 0)
        snprintf(device->unsupported, sizeof device->unsupported, "%s", value);
    else if (strcmp(key, "memory_total") == 0)
        device->memory_total = strtoull(value, NULL, 10);
    else if (strcmp(key, "power_limit_w") == 0)
        device->power_limit_w = atof(value);
    else if (strcmp(key, "tick_s") == 0)
        device->tick_s = atof(value);
    else if (strcmp(key, "parent") == 0)
        device->parent = atoi(value);
    else if (strcmp(key, "power") == 0)
        parse_curve(&device->power, value);
    else if (strcmp(key, "memory") == 0)
        parse_curve(&device->memory, value);
    else if (strcmp(key, "utilization") == 0)
        parse_curve(&device->utilization, value);
}

static int read_trace(void)
{
    const char *path = getenv("NVML_TRACE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[1024], *rest, *word;
    if (!file)
        return DRIVER_NOT_LOADED;
    num_devices = 0;
    while (num_devices < MAX_DEVICES && fgets(line, sizeof line, file)) {
        word = strtok_r(line, " \n", &rest);
        if (!word || (strcmp(word, "device") != 0 && strcmp(word, "slice") != 0))
            continue;
        struct device *device = &devices[num_devices++];
        memset(device, 0, sizeof *device);
        device->parent = -1;
        while ((word = strtok_r(NULL, " \n", &rest))) {
            char *value = strchr(word, '=');
            if (value) {
                *value = '\0';
                parse_setting(device, word, value + 1);
            }
        }
    }
    fclose(file);
    return SUCCESS;
}

/* --- faults --------------------------------------------------------------------------------------- */

/* What the faults file says of one call on one target; device is NULL for "init". */
static int look_up(const char *target, struct device *device, const char *call, struct fault *fault)
{
    char path[4096], line[256], where[16], what[32], verb[16];
    double number, from_s, until_s, t = now_s();
    int result = SUCCESS;
    const char *trace = getenv("NVML_TRACE");
    snprintf(path, sizeof path, "%s.faults", trace ? trace : "");
    FILE *file = fopen(path, "r");
    if (!file)
        return SUCCESS;
    while (fgets(line, sizeof line, file)) {
        number = 0, from_s = 0, until_s = INFINITY;
        if (sscanf(line, "%15s %31s %15s %lf %lf %lf", where, what, verb, &number, &from_s, &until_s) < 3)
            continue;
        if ((strcmp(where, target) != 0 && !(device && strcmp(where, "*") == 0)) || t < from_s || t >= until_s)
            continue;
        if (strcmp(what, call) != 0 && strcmp(what, "*") != 0)
            continue;
        if (strcmp(verb, "error") == 0)
            result = (int)number;
        else if (strcmp(verb, "lost") == 0 && device)
            device->lost = 1;
        else if (strcmp(verb, "value") == 0 && fault)
            fault->has_value = 1, fault->value = number;
        else if (strcmp(verb, "reset") == 0 && fault)
            fault->has_reset = t >= number, fault->reset_s = number;
    }
    fclose(file);
    return result;
}

static int is_listed(const char *list, const char *word)
{
    char copy[128], *rest;
    snprintf(copy, sizeof copy, "%s", list);
    for (char *entry = strtok_r(copy, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest))
        if (strcmp(entry, word) == 0)
            return 1;
    return 0;
}

/* Every call on a device begins here. */
static int enter(struct device *device, const char *call, struct fault *fault)
{
    char target[16];
    if (fault)
        memset(fault, 0, sizeof *fault);
    if (!initialized)
        return UNINITIALIZED;
    if (device < devices || device >= devices + num_devices)
        return INVALID_ARGUMENT;
    snprintf(target, sizeof target, "%d", (int)(device - devices));
    int result = look_up(target, device, call, fault);
    if (device->lost)
        return GPU_IS_LOST;
    if (result == SUCCESS && is_listed(device->unsupported, call))
        return NOT_SUPPORTED;
    return result;
}

static int give_text(const char *text, char *buffer, unsigned int length)
{
    return (unsigned int)snprintf(buffer, length, "%s", text) < length ? SUCCESS : INSUFFICIENT_SIZE;
}

/* --- NVML: the library ---------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    int result = look_up("init", NULL, "*", NULL);
    if (result == SUCCESS && initialized == 0)
        result = read_trace(); /* which also forgets who was lost */
    if (result == SUCCESS)
        initialized++;
    return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    if (!initialized)
        return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(int result)
{
    static char text[32];
    snprintf(text, sizeof text, "error %d", result);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length) { return give_text("570.0", version, length); }

int nvmlSystemGetNVMLVersion(char *version, unsigned int length) { return give_text("12.570.0", version, length); }

int nvmlSystemGetCudaDriverVersion(int *version) { return *version = 12080, SUCCESS; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* --- NVML: which device --------------------------------------------------------------------------- */

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (!initialized)
        return UNINITIALIZED;
    *count = 0;
    for (int i = 0; i < num_devices; i++)
        *count += devices[i].parent < 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **handle)
{
    if (!initialized)
        return UNINITIALIZED;
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent < 0 && index-- == 0) {
            *handle = &devices[i];
            return enter(*handle, "handle", NULL);
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **handle)
{
    if (!initialized)
        return UNINITIALIZED;
    for (int i = 0; i < num_devices; i++)
        if (strcmp(devices[i].uuid, uuid) == 0) {
            *handle = &devices[i];
            return enter(*handle, "handle", NULL);
        }
    return NOT_FOUND;
}

static int parse_bus(const char *text, struct pci *pci)
{
    return sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) == 3;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, struct device **handle)
{
    struct pci wanted, own;
    if (!initialized)
        return UNINITIALIZED;
    if (!parse_bus(bus, &wanted))
        return INVALID_ARGUMENT;
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent < 0 && parse_bus(devices[i].bus, &own) && own.domain == wanted.domain &&
            own.bus == wanted.bus && own.device == wanted.device) {
            *handle = &devices[i];
            return enter(*handle, "handle", NULL);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(struct device *device, unsigned int *index)
{
    int result = enter(device, "index", NULL);
    *index = 0;
    for (struct device *other = devices; result == SUCCESS && other < device; other++)
        *index += other->parent < 0;
    return result;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned int length)
{
    int result = enter(device, "uuid", NULL);
    return result ? result : give_text(device->uuid, uuid, length);
}

int nvmlDeviceGetName(struct device *device, char *name, unsigned int length)
{
    int result = enter(device, "name", NULL);
    return result ? result : give_text(device->name, name, length);
}

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci)
{
    int result = enter(device, "pci", NULL);
    if (result)
        return result;
    memset(pci, 0, sizeof *pci);
    if (!parse_bus(device->bus, pci))
        return NOT_SUPPORTED;
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    snprintf(pci->bus_legacy, sizeof pci->bus_legacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus & 0xFF,
             pci->device & 0xFF);
    return SUCCESS;
}

/* --- NVML: slices --------------------------------------------------------------------------------- */

int nvmlDeviceIsMigDeviceHandle(struct device *device, unsigned int *is_slice)
{
    int result = enter(device, "mig", NULL);
    if (result == SUCCESS)
        *is_slice = device->parent >= 0;
    return result;
}

static struct device *slice(struct device *device, unsigned int index)
{
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent == (int)(device - devices) && index-- == 0)
            return &devices[i];
    return NULL;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned int *current, unsigned int *pending)
{
    int result = enter(device, "mig", NULL);
    if (result == SUCCESS)
        *current = *pending = slice(device, 0) != NULL;
    return result;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned int *count)
{
    int result = enter(device, "mig", NULL);
    for (*count = 0; result == SUCCESS && slice(device, *count); (*count)++)
        continue;
    return result;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned int index, struct device **handle)
{
    int result = enter(device, "mig", NULL);
    if (result)
        return result;
    *handle = slice(device, index);
    return *handle ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *device, struct device **handle)
{
    int result = enter(device, "mig", NULL);
    if (result)
        return result;
    if (device->parent < 0)
        return INVALID_ARGUMENT;
    *handle = &devices[device->parent];
    return SUCCESS;
}

/* --- NVML: what it measures ----------------------------------------------------------------------- */

static int used_bytes(struct device *device, unsigned long long *used)
{
    struct fault fault;
    int result = enter(device, "memory", &fault);
    *used = (unsigned long long)at(&device->memory, now_s());
    if (fault.has_value)
        *used = fault.value >= 18446744073709551615.0 ? UINT64_MAX : (unsigned long long)fault.value;
    return result;
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory)
{
    int result = used_bytes(device, &memory->used);
    memory->total = device->memory_total;
    memory->free = memory->total - memory->used;
    return result;
}

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory)
{
    int result = used_bytes(device, &memory->used);
    memory->total = device->memory_total;
    memory->reserved = 0;
    memory->free = memory->total - memory->used;
    return result;
}

int nvmlDeviceGetUtilizationRates(struct device *device, struct utilization *utilization)
{
    struct fault fault;
    int result = device && device->parent >= 0 ? NOT_SUPPORTED : enter(device, "utilization", &fault);
    if (result)
        return result;
    double percent = fault.has_value ? fault.value : round(100 * at(&device->utilization, now_s()));
    utilization->gpu = (unsigned int)percent;
    utilization->memory = utilization->gpu;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(struct device *device, unsigned int *milliwatts)
{
    struct fault fault;
    int result = device && device->parent >= 0 ? NOT_SUPPORTED : enter(device, "power", &fault);
    if (result)
        return result;
    *milliwatts = (unsigned int)(fault.has_value ? fault.value : 1e3 * at(&device->power, now_s()));
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned int *milliwatts)
{
    int result = device && device->parent >= 0 ? NOT_SUPPORTED : enter(device, "limit", NULL);
    if (result)
        return result;
    *milliwatts = (unsigned int)(1e3 * device->power_limit_w);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(struct device *device, unsigned long long *millijoules)
{
    struct fault fault;
    int result = device && device->parent >= 0 ? NOT_SUPPORTED : enter(device, "energy", &fault);
    if (result)
        return result;
    double t = now_s();
    if (device->tick_s > 0)
        t = floor(t / device->tick_s) * device->tick_s;
    double joules = integral(&device->power, t);
    if (fault.has_reset)
        joules = fmax(0, joules - integral(&device->power, fault.reset_s));
    *millijoules = (unsigned long long)(1e3 * joules);
    if (fault.has_value)
        *millijoules = fault.value >= 18446744073709551615.0 ? UINT64_MAX : (unsigned long long)fault.value;
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(struct device *device, int count, struct field *fields)
{
    int result = enter(device, "fields", NULL);
    for (int i = 0; result == SUCCESS && i < count; i++) {
        struct field *field = &fields[i];
        field->timestamp_us = (long long)(now_s() * 1e6);
        field->latency_us = 0;
        field->value_type = 1;
        if (field->id == FIELD_POWER_INSTANT || field->id == FIELD_POWER_AVERAGE) {
            field->result = nvmlDeviceGetPowerUsage(device, &field->value.ui);
        } else if (field->id == FIELD_TOTAL_ENERGY) {
            field->value_type = 3;
            field->result = nvmlDeviceGetTotalEnergyConsumption(device, &field->value.ull);
        } else {
            field->result = NOT_SUPPORTED;
        }
    }
    return result;
}
