/* What the parts of this NVML share; what the trace and the faults may say stands in libnvidia-ml.c. */

#ifndef TRACED_H
#define TRACED_H

#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    MEMORY_ERROR = 20,
    NO_DATA = 21,
    ARGUMENT_VERSION_MISMATCH = 25,
};

enum { MAX_DEVICES = 64 };

struct curve {
    enum { NONE, FLAT, SQUARE, SINE, BURSTS, STEPS } shape;
    double low, high, period_s, duty;
    uint64_t seed;
    struct sums *sums; /* of the steps so far */
};

struct device {
    int parent; /* -1: a whole GPU */
    char uuid[96], bus[32], name[96], serial[32], unsupported[256];
    int architecture, brand, module_id;
    struct curve power, module_power, memory_power;
    struct curve memory, utilization, sm_clock_mhz, memory_clock_mhz, temperature_c;
    struct curve sm_activity, sm_occupancy, tensor_activity, dram_activity;
    unsigned long long memory_total, memory_reserved, throttle, ecc_corrected, ecc_uncorrected;
    double power_limit_w, power_limit_default_w, sm_clock_max_mhz, power_profiles;
    double pcie_width, pcie_width_max, pcie_generation, nvlinks, nvlink_errors;
    double tick_s, tick_phase_s, tick_jitter_s, duty_s, lag_s, origin_s, average_s, gain;
    int held, usage_is_average, energy_of_module, gpm;
    int instance, compute_instance, slices, compute_slices, multiprocessors, processes, minor;
    int lost;
    uint64_t seed; /* of its uuid */
    struct { int started; int64_t tick; double joules; } measured;
};

/* When a call looks at the curves, and what the faults say of it. */
struct effect {
    double t_s, value, reset_s, offset_j;
    int has_value, has_reset;
};

struct event { int position; unsigned long long number; };

#pragma GCC visibility push(hidden)

extern struct device devices[MAX_DEVICES];
extern char driver_version[32], nvml_version[32];
extern int num_devices, initialized, cuda_version;

/* curves.c */
double draw(uint64_t seed, int64_t number); /* in [0, 1) */
void parse_curve(struct curve *curve, const char *text);
void forget_curve(struct curve *curve);
double at(const struct curve *curve, double t);
double integral(struct curve *curve, double t0, double t1);
double mean(struct curve *curve, double t0, double t1);

/* trace.c */
int read_trace(void);

/* faults.c */
double now_s(void);
void sleep_s(double seconds);
void find_files(void);
void count_call(const char *function);
int enter_init(void);
int enter(const char *function, struct device *device, const char *call, struct effect *effect);
int enter_whole(const char *function, struct device *device, const char *call, struct effect *effect);
int take_event(const double *registered_s, struct event *event);

/* sensors.c */
enum power { INSTANT, AVERAGE };
double counter_j(struct device *device, const struct effect *effect);
double power_w(struct device *device, struct curve *curve, enum power kind, double t);

#pragma GCC visibility pop

#endif
