/* GPM: metrics as means between two samples, of a GPU or of a slice. */

#include "traced.h"

enum { VERSION = 1, NUM_IDS = 16 };

static const double least_apart_s = 0.1;

struct gpm_support { unsigned int version, is_supported; };

struct gpm_sample {
    struct device *device;
    double t_s;
};

struct gpm_metric {
    unsigned int id;
    int result;
    double value;
    struct { const char *short_name, *long_name, *unit; } info;
};

struct gpm_metrics {
    unsigned int version, count;
    struct gpm_sample *sample1, *sample2;
    struct gpm_metric metrics[];
};

int nvmlGpmQueryDeviceSupport(struct device *device, struct gpm_support *support)
{
    int result = enter(__func__, device, "gpm.support", NULL);
    if (result)
        return result;
    if (support->version != VERSION)
        return ARGUMENT_VERSION_MISMATCH;
    support->is_supported = (unsigned int)device->gpm;
    return SUCCESS;
}

int nvmlGpmSampleAlloc(struct gpm_sample **sample)
{
    count_call(__func__);
    *sample = calloc(1, sizeof **sample);
    return *sample ? SUCCESS : MEMORY_ERROR;
}

int nvmlGpmSampleFree(struct gpm_sample *sample)
{
    count_call(__func__);
    free(sample);
    return SUCCESS;
}

static int take_sample(const char *function, struct device *device, struct gpm_sample *sample)
{
    struct effect effect;
    int result = enter(function, device, "gpm.sample", &effect);
    if (result == SUCCESS)
        *sample = (struct gpm_sample){device, effect.t_s};
    return result;
}

int nvmlGpmSampleGet(struct device *device, struct gpm_sample *sample)
{
    int result = enter_whole(__func__, device, "gpm.support", NULL);
    if (result)
        return result;
    return device->gpm ? take_sample(NULL, device, sample) : NOT_SUPPORTED;
}

int nvmlGpmMigSampleGet(struct device *device, unsigned int instance, struct gpm_sample *sample)
{
    int result = enter_whole(__func__, device, "gpm.support", NULL);
    if (result)
        return result;
    if (!device->gpm)
        return NOT_SUPPORTED;
    for (struct device *slice = devices; slice < devices + num_devices; slice++)
        if (slice->parent == (int)(device - devices) && slice->instance == (int)instance)
            return take_sample(NULL, slice, sample);
    return NOT_FOUND;
}

static struct curve *curve_of(struct device *device, unsigned int id)
{
    struct curve *const curves[NUM_IDS] = {
        [1] = &device->utilization, [2] = &device->sm_activity, [3] = &device->sm_occupancy,
        [5] = &device->tensor_activity, [10] = &device->dram_activity,
    };
    struct curve *curve = id < NUM_IDS ? curves[id] : NULL;
    return curve && curve->shape != NONE ? curve : NULL;
}

int nvmlGpmMetricsGet(struct gpm_metrics *get)
{
    struct gpm_sample *first = get->sample1, *last = get->sample2;
    struct effect effect;
    if (get->version != VERSION)
        return ARGUMENT_VERSION_MISMATCH;
    if (!first || !last || first->device != last->device)
        return INVALID_ARGUMENT;
    int result = enter(__func__, first->device, "gpm.metrics", &effect);
    for (struct gpm_metric *metric = get->metrics; result == SUCCESS && metric < get->metrics + get->count; metric++) {
        struct curve *curve = curve_of(first->device, metric->id);
        metric->result = !curve ? NOT_SUPPORTED : last->t_s - first->t_s < least_apart_s ? NO_DATA : SUCCESS;
        if (metric->result == SUCCESS)
            metric->value = effect.has_value ? effect.value : 100 * mean(curve, first->t_s, last->t_s);
    }
    return result;
}
