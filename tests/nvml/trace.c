/* The trace: which devices there are, and what they are like. */

#include "traced.h"

#include <stddef.h>

struct device devices[MAX_DEVICES];
int num_devices, initialized, cuda_version;
char driver_version[32], nvml_version[32];

struct setting {
    const char *key;
    enum { TEXT, NUMBER, COUNT, INTEGER, CURVE, CHOICE } kind;
    size_t offset, size;
    const char *chosen; /* of a choice: the value that means yes */
};

#define SETTING(kind, key) {#key, kind, offsetof(struct device, key), sizeof(((struct device *)0)->key), NULL}

static const struct setting settings[] = {
    SETTING(TEXT, uuid), SETTING(TEXT, bus), SETTING(TEXT, name), SETTING(TEXT, serial), SETTING(TEXT, unsupported),
    SETTING(INTEGER, parent), SETTING(INTEGER, architecture), SETTING(INTEGER, brand), SETTING(INTEGER, module_id),
    SETTING(CURVE, power), SETTING(CURVE, module_power), SETTING(CURVE, memory_power),
    SETTING(CURVE, memory), SETTING(CURVE, utilization), SETTING(CURVE, sm_clock_mhz),
    SETTING(CURVE, memory_clock_mhz), SETTING(CURVE, temperature_c),
    SETTING(CURVE, sm_activity), SETTING(CURVE, sm_occupancy), SETTING(CURVE, tensor_activity),
    SETTING(CURVE, dram_activity),
    SETTING(COUNT, memory_total), SETTING(COUNT, memory_reserved), SETTING(COUNT, throttle),
    SETTING(COUNT, ecc_corrected), SETTING(COUNT, ecc_uncorrected),
    SETTING(NUMBER, power_limit_w), SETTING(NUMBER, power_limit_default_w),
    SETTING(NUMBER, sm_clock_max_mhz), SETTING(NUMBER, power_profiles),
    SETTING(NUMBER, pcie_width), SETTING(NUMBER, pcie_width_max), SETTING(NUMBER, pcie_generation),
    SETTING(NUMBER, nvlinks), SETTING(NUMBER, nvlink_errors),
    SETTING(NUMBER, tick_s), SETTING(NUMBER, tick_phase_s), SETTING(NUMBER, tick_jitter_s), SETTING(NUMBER, duty_s),
    SETTING(NUMBER, lag_s), SETTING(NUMBER, origin_s), SETTING(NUMBER, average_s), SETTING(NUMBER, gain),
    SETTING(INTEGER, gpm), SETTING(INTEGER, instance), SETTING(INTEGER, compute_instance), SETTING(INTEGER, slices),
    SETTING(INTEGER, compute_slices), SETTING(INTEGER, multiprocessors),
    SETTING(INTEGER, processes), SETTING(INTEGER, minor),
    {"power_mode", CHOICE, offsetof(struct device, held), 0, "held"},
    {"power_usage", CHOICE, offsetof(struct device, usage_is_average), 0, "average"},
    {"energy_scope", CHOICE, offsetof(struct device, energy_of_module), 0, "module"},
};

enum { NUM_SETTINGS = sizeof settings / sizeof *settings };

/* "%20" stands for a space. */
static void copy_text(char *to, size_t size, const char *text)
{
    for (; *text && size > 1; size--) {
        int is_space = strncmp(text, "%20", 3) == 0;
        *to++ = is_space ? ' ' : *text;
        text += is_space ? 3 : 1;
    }
    *to = '\0';
}

static void set(struct device *device, const char *key, const char *value)
{
    const struct setting *setting = settings;
    while (setting < settings + NUM_SETTINGS && strcmp(setting->key, key) != 0)
        setting++;
    if (setting == settings + NUM_SETTINGS)
        return;
    void *field = (char *)device + setting->offset;
    switch (setting->kind) {
    case TEXT:
        copy_text(field, setting->size, value);
        break;
    case NUMBER:
        *(double *)field = atof(value);
        break;
    case COUNT:
        *(unsigned long long *)field = strtoull(value, NULL, 0);
        break;
    case INTEGER:
        *(int *)field = atoi(value);
        break;
    case CURVE:
        parse_curve(field, value);
        break;
    case CHOICE:
        *(int *)field = strcmp(value, setting->chosen) == 0;
        break;
    }
}

static void set_of_system(const char *key, const char *value)
{
    if (strcmp(key, "driver") == 0)
        copy_text(driver_version, sizeof driver_version, value);
    else if (strcmp(key, "nvml") == 0)
        copy_text(nvml_version, sizeof nvml_version, value);
    else if (strcmp(key, "cuda") == 0)
        cuda_version = atoi(value);
}

static void forget_devices(void)
{
    for (struct device *device = devices; device < devices + num_devices; device++)
        for (int i = 0; i < NUM_SETTINGS; i++)
            if (settings[i].kind == CURVE)
                forget_curve((struct curve *)((char *)device + settings[i].offset));
    num_devices = 0;
}

static uint64_t fnv1a(const char *text)
{
    uint64_t hash = 0xCBF29CE484222325;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001B3;
    return hash;
}

static struct device *new_device(void)
{
    struct device *device = &devices[num_devices++];
    memset(device, 0, sizeof *device);
    device->parent = device->architecture = device->module_id = device->instance = device->minor = -1;
    device->brand = 14; /* NVIDIA */
    device->power_limit_default_w = -1;
    device->power_profiles = -1;
    device->average_s = device->gain = 1;
    return device;
}

int read_trace(void)
{
    const char *path = getenv("NVML_TRACE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[8192], *rest, *word, *value;
    if (!file)
        return DRIVER_NOT_LOADED;
    forget_devices();
    strcpy(driver_version, "570.0");
    strcpy(nvml_version, "12.570.0");
    cuda_version = 12080;
    while (num_devices < MAX_DEVICES && fgets(line, sizeof line, file)) {
        word = strtok_r(line, " \n", &rest);
        int is_system = word && strcmp(word, "system") == 0;
        if (!word || (!is_system && strcmp(word, "device") != 0 && strcmp(word, "slice") != 0))
            continue;
        struct device *device = is_system ? NULL : new_device();
        while ((word = strtok_r(NULL, " \n", &rest))) {
            if (!(value = strchr(word, '=')))
                continue;
            *value++ = '\0';
            if (is_system)
                set_of_system(word, value);
            else
                set(device, word, value);
        }
        if (device)
            device->seed = fnv1a(device->uuid);
    }
    fclose(file);
    return SUCCESS;
}
