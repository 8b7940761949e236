/* What the devices measure. */

#include "traced.h"

#include <time.h>

enum {
    FIELD_TOTAL_ENERGY = 83,
    FIELD_POWER_AVERAGE = 185,
    FIELD_POWER_INSTANT = 186,
    FIELD_POWER_DEFAULT_LIMIT = 189,
    FIELD_POWER_CURRENT_LIMIT = 190,
};

enum { SCOPE_GPU, SCOPE_MODULE, SCOPE_MEMORY, NUM_SCOPES = 4 };

enum { CLOCK_MEMORY = 2, CLOCK_ID_CURRENT = 0, ECC_CORRECTED = 0, TEMPERATURE_OF_GPU = 0, TEMPERATURE_V1 = 0x100000C };

enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, POWER_PROFILES_V1 = 0x1000064 };

/* The structures of nvml.h, as far as they are used. */
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned int version; unsigned long long total, reserved, free, used; };
struct utilization { unsigned int gpu, memory; };
struct process { unsigned int pid; unsigned long long memory; unsigned int instance, compute_instance; };
struct temperature { unsigned int version, sensor; int celsius; };
struct power_profiles { unsigned int version, known[8], requested[8], enforced[8]; };
struct field {
    unsigned int id, scope;
    long long timestamp_us, latency_us;
    unsigned int value_type;
    int result;
    union { double d; unsigned int ui; unsigned long long ull; } value;
};

static unsigned long long whole(double number)
{
    return number >= 18446744073709551615.0 ? UINT64_MAX : (unsigned long long)number;
}

/* A raw number: the fault's, or what a curve has at the moment. */
static unsigned int raw(const struct curve *curve, const struct effect *effect, double unit)
{
    return (unsigned int)(effect->has_value ? effect->value : round(unit * at(curve, effect->t_s)));
}

/* --- memory, utilization, clocks and health ------------------------------------------------------- */

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory)
{
    struct effect effect;
    int result = enter(__func__, device, "memory.v1", &effect);
    if (result)
        return result;
    unsigned long long used = whole(at(&device->memory, effect.t_s)) + device->memory_reserved;
    memory->total = device->memory_total;
    memory->used = effect.has_value ? whole(effect.value) : used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory)
{
    struct effect effect;
    int result = enter(__func__, device, "memory.v2", &effect);
    if (result)
        return result;
    if (memory->version != (sizeof *memory | 2 << 24))
        return ARGUMENT_VERSION_MISMATCH;
    memory->total = device->memory_total;
    memory->reserved = device->memory_reserved;
    memory->used = whole(effect.has_value ? effect.value : at(&device->memory, effect.t_s));
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(struct device *device, struct utilization *utilization)
{
    struct effect effect;
    int result = enter_whole(__func__, device, "utilization", &effect);
    if (result == SUCCESS)
        utilization->gpu = utilization->memory = raw(&device->utilization, &effect, 100);
    return result;
}

static int give_clock(const char *function, struct device *device, unsigned int type, unsigned int *mhz)
{
    struct effect effect;
    int is_memory = type == CLOCK_MEMORY;
    int result = enter_whole(function, device, is_memory ? "clocks.memory" : "clocks.sm", &effect);
    if (result)
        return result;
    const struct curve *curve = is_memory ? &device->memory_clock_mhz : &device->sm_clock_mhz;
    *mhz = raw(curve, &effect, 1);
    return type > CLOCK_MEMORY || curve->shape == NONE ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetClockInfo(struct device *device, unsigned int type, unsigned int *mhz)
{
    return give_clock(__func__, device, type, mhz);
}

int nvmlDeviceGetMaxClockInfo(struct device *device, unsigned int type, unsigned int *mhz)
{
    struct effect effect;
    int result = enter_whole(__func__, device, "clocks.max", &effect);
    if (result)
        return result;
    if (type >= CLOCK_MEMORY || !device->sm_clock_max_mhz)
        return NOT_SUPPORTED;
    *mhz = effect.has_value ? (unsigned int)effect.value : (unsigned int)device->sm_clock_max_mhz;
    return SUCCESS;
}

int nvmlDeviceGetClock(struct device *device, unsigned int type, unsigned int id, unsigned int *mhz)
{
    int result = give_clock(__func__, device, type, mhz);
    return result == SUCCESS && id != CLOCK_ID_CURRENT ? NOT_SUPPORTED : result;
}

static int give_temperature(const char *function, struct device *device, unsigned int sensor, unsigned int *celsius)
{
    struct effect effect;
    int result = enter_whole(function, device, "temperature", &effect);
    if (result)
        return result;
    *celsius = raw(&device->temperature_c, &effect, 1);
    if (sensor != TEMPERATURE_OF_GPU)
        return INVALID_ARGUMENT;
    return device->temperature_c.shape == NONE ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetTemperature(struct device *device, unsigned int sensor, unsigned int *celsius)
{
    return give_temperature(__func__, device, sensor, celsius);
}

int nvmlDeviceGetTemperatureV(struct device *device, struct temperature *temperature)
{
    unsigned int celsius = 0;
    int result = give_temperature(__func__, device, temperature->sensor, &celsius);
    temperature->celsius = (int)celsius;
    return result == SUCCESS && temperature->version != TEMPERATURE_V1 ? ARGUMENT_VERSION_MISMATCH : result;
}

static int give_reasons(const char *function, struct device *device, unsigned long long *reasons)
{
    struct effect effect;
    int result = enter_whole(function, device, "throttle", &effect);
    if (result == SUCCESS)
        *reasons = effect.has_value ? whole(effect.value) : device->throttle;
    return result;
}

int nvmlDeviceGetCurrentClocksEventReasons(struct device *device, unsigned long long *reasons)
{
    return give_reasons(__func__, device, reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *device, unsigned long long *reasons)
{
    return give_reasons(__func__, device, reasons);
}

int nvmlDeviceGetTotalEccErrors(struct device *device, unsigned int type, unsigned int counter,
                                unsigned long long *errors)
{
    (void)counter; /* volatile and aggregate are the same here */
    struct effect effect;
    int is_corrected = type == ECC_CORRECTED;
    int result = enter_whole(__func__, device, is_corrected ? "ecc.corrected" : "ecc.uncorrected", &effect);
    if (result)
        return result;
    unsigned long long known = is_corrected ? device->ecc_corrected : device->ecc_uncorrected;
    *errors = effect.has_value ? whole(effect.value) : known;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned int *count, struct process *processes)
{
    struct effect effect;
    int result = enter(__func__, device, "processes", &effect);
    if (result)
        return result;
    unsigned int room = *count, known = effect.has_value ? (unsigned int)effect.value : (unsigned int)device->processes;
    *count = known;
    if (room < known)
        return INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < known; i++)
        processes[i] = (struct process){.pid = i + 1, .memory = 1 << 30, .instance = -1, .compute_instance = -1};
    return SUCCESS;
}

static int give_link(const char *function, struct device *device, double known, unsigned int *number)
{
    struct effect effect;
    int result = enter_whole(function, device, "links", &effect);
    if (result == SUCCESS && !known && !effect.has_value)
        result = NOT_SUPPORTED;
    *number = (unsigned int)(effect.has_value ? effect.value : known);
    return result;
}

int nvmlDeviceGetCurrPcieLinkWidth(struct device *device, unsigned int *width)
{
    return give_link(__func__, device, device->pcie_width, width);
}

int nvmlDeviceGetMaxPcieLinkWidth(struct device *device, unsigned int *width)
{
    return give_link(__func__, device, device->pcie_width_max, width);
}

int nvmlDeviceGetCurrPcieLinkGeneration(struct device *device, unsigned int *generation)
{
    return give_link(__func__, device, device->pcie_generation, generation);
}

int nvmlDeviceGetMaxPcieLinkGeneration(struct device *device, unsigned int *generation)
{
    return give_link(__func__, device, device->pcie_generation, generation);
}

int nvmlDeviceGetNvLinkState(struct device *device, unsigned int link, unsigned int *is_active)
{
    int result = give_link(__func__, device, device->nvlinks, is_active);
    *is_active = link < device->nvlinks;
    return result;
}

int nvmlDeviceGetNvLinkErrorCounter(struct device *device, unsigned int link, unsigned int counter,
                                    unsigned long long *errors)
{
    unsigned int ignored;
    *errors = link == 0 && counter == 0 ? (unsigned long long)device->nvlink_errors : 0;
    return give_link(__func__, device, device->nvlinks, &ignored);
}

int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(struct device *device, struct power_profiles *profiles)
{
    struct effect effect;
    int result = enter_whole(__func__, device, "profiles", &effect);
    if (result)
        return result;
    if (profiles->version != POWER_PROFILES_V1)
        return ARGUMENT_VERSION_MISMATCH;
    if (device->power_profiles < 0)
        return NOT_SUPPORTED;
    profiles->enforced[0] = (unsigned int)device->power_profiles;
    return SUCCESS;
}

/* --- power and energy ----------------------------------------------------------------------------- */

static int give_limit(const char *function, struct device *device, const char *call, double watts,
                      unsigned int *milliwatts)
{
    struct effect effect;
    int result = enter_whole(function, device, call, &effect);
    if (result == SUCCESS)
        *milliwatts = (unsigned int)(effect.has_value ? effect.value : 1e3 * watts);
    return result;
}

static double default_limit_w(const struct device *device)
{
    return device->power_limit_default_w < 0 ? device->power_limit_w : device->power_limit_default_w;
}

int nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned int *milliwatts)
{
    return give_limit(__func__, device, "limit.enforced", device->power_limit_w, milliwatts);
}

int nvmlDeviceGetPowerManagementLimit(struct device *device, unsigned int *milliwatts)
{
    return give_limit(__func__, device, "limit.management", device->power_limit_w, milliwatts);
}

int nvmlDeviceGetPowerManagementDefaultLimit(struct device *device, unsigned int *milliwatts)
{
    return give_limit(__func__, device, "limit.default", default_limit_w(device), milliwatts);
}

static int give_power(const char *function, struct device *device, const char *call, struct curve *curve,
                      enum power kind, unsigned int *milliwatts)
{
    struct effect effect;
    int result = enter_whole(function, device, call, &effect);
    if (result)
        return result;
    if (curve->shape == NONE)
        return NOT_SUPPORTED;
    double watts = effect.has_value ? 0 : power_w(device, curve, kind, effect.t_s);
    *milliwatts = (unsigned int)(effect.has_value ? effect.value : 1e3 * watts);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(struct device *device, unsigned int *milliwatts)
{
    enum power kind = device && device->usage_is_average ? AVERAGE : INSTANT;
    return give_power(__func__, device, "power.usage", &device->power, kind, milliwatts);
}

static int give_power_of(struct device *device, enum power kind, unsigned int scope, unsigned int *milliwatts)
{
    static const char *const calls[][NUM_SCOPES] = {
        [INSTANT] = {"power.instant.gpu", "power.instant.module", "power.instant.memory", "power.instant.base"},
        [AVERAGE] = {"power.average.gpu", "power.average.module", "power.average.memory", "power.average.base"},
    };
    if (scope >= NUM_SCOPES)
        return INVALID_ARGUMENT;
    struct curve none = {0}, *curve = &none;
    if (scope == SCOPE_GPU)
        curve = &device->power;
    else if (scope == SCOPE_MODULE)
        curve = &device->module_power;
    else if (scope == SCOPE_MEMORY && kind == AVERAGE) /* of which no board knows the instantaneous power */
        curve = &device->memory_power;
    return give_power(NULL, device, calls[kind][scope], curve, kind, milliwatts);
}

static int give_energy(const char *function, struct device *device, const char *call, unsigned long long *millijoules)
{
    struct effect effect;
    int result = enter_whole(function, device, call, &effect);
    if (result)
        return result;
    if (device->energy_of_module && device->module_power.shape == NONE)
        return NOT_SUPPORTED;
    *millijoules = whole(effect.has_value ? effect.value : 1e3 * counter_j(device, &effect));
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(struct device *device, unsigned long long *millijoules)
{
    return give_energy(__func__, device, "energy.call", millijoules);
}

static int give_field(struct device *device, struct field *field)
{
    field->value_type = UNSIGNED_INT;
    switch (field->id) {
    case FIELD_POWER_INSTANT:
        return give_power_of(device, INSTANT, field->scope, &field->value.ui);
    case FIELD_POWER_AVERAGE:
        return give_power_of(device, AVERAGE, field->scope, &field->value.ui);
    case FIELD_POWER_DEFAULT_LIMIT:
        return give_limit(NULL, device, "limit.default", default_limit_w(device), &field->value.ui);
    case FIELD_POWER_CURRENT_LIMIT:
        return give_limit(NULL, device, "limit.management", device->power_limit_w, &field->value.ui);
    case FIELD_TOTAL_ENERGY:
        field->value_type = UNSIGNED_LONG_LONG;
        return give_energy(NULL, device, "energy.field", &field->value.ull);
    default:
        return NOT_SUPPORTED; /* NVLink's throughput among them */
    }
}

int nvmlDeviceGetFieldValues(struct device *device, int count, struct field *fields)
{
    int result = enter(__func__, device, "fields", NULL);
    for (struct field *field = fields; result == SUCCESS && field < fields + count; field++) {
        struct timespec now;
        field->result = give_field(device, field);
        clock_gettime(CLOCK_REALTIME, &now);
        field->timestamp_us = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        field->latency_us = 0;
    }
    return result;
}
