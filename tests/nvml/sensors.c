/* How the sensors of a board see the curves of its power: at ticks, for part of the time, late, and with a gain. */

#include "traced.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double tick_moment(const struct device *device, int64_t tick)
{
    double moment = device->tick_phase_s + (double)tick * device->tick_s;
    if (device->tick_jitter_s > 0)
        moment += device->tick_jitter_s * (2 * draw(device->seed, tick) - 1);
    return moment;
}

static int64_t last_tick(const struct device *device, double t)
{
    int64_t tick = (int64_t)floor((t - device->tick_phase_s) / device->tick_s) + 1;
    while (tick_moment(device, tick) > t)
        tick--;
    return tick;
}

static double of_tick_j(struct device *device, struct curve *curve, int64_t tick)
{
    double end_s = tick_moment(device, tick);
    return mean(curve, end_s - device->duty_s, end_s) * (end_s - tick_moment(device, tick - 1));
}

/* The sum over the ticks since the origin, of which the process remembers the latest. */
static double measured_j(struct device *device, struct curve *curve, int64_t tick)
{
    int64_t first = last_tick(device, device->origin_s), from = first;
    double joules = 0;
    pthread_mutex_lock(&lock);
    if (device->measured.started && device->measured.tick <= tick)
        from = device->measured.tick, joules = device->measured.joules;
    for (; from < tick; from++)
        joules += of_tick_j(device, curve, from + 1);
    if (tick >= first && (!device->measured.started || device->measured.tick < tick)) {
        device->measured.started = 1;
        device->measured.tick = tick;
        device->measured.joules = joules;
    }
    pthread_mutex_unlock(&lock);
    return joules;
}

/* What the energy counter shows. */
double counter_j(struct device *device, const struct effect *effect)
{
    struct curve *curve = device->energy_of_module ? &device->module_power : &device->power;
    double t = effect->t_s - device->lag_s, from_s = effect->has_reset ? effect->reset_s : device->origin_s;
    double joules;
    if (device->tick_s <= 0) {
        joules = integral(curve, from_s, t);
    } else if (device->duty_s <= 0) {
        joules = integral(curve, from_s, tick_moment(device, last_tick(device, t)));
    } else {
        joules = measured_j(device, curve, last_tick(device, t));
        if (effect->has_reset)
            joules -= measured_j(device, curve, last_tick(device, effect->reset_s));
    }
    return fmax(0, device->gain * joules + effect->offset_j);
}

/* What a power sensor shows. */
double power_w(struct device *device, struct curve *curve, enum power kind, double t)
{
    if (!device->held || device->tick_s <= 0)
        return device->gain * (kind == AVERAGE ? mean(curve, t - device->average_s, t) : at(curve, t));
    int64_t tick = last_tick(device, t);
    double end_s = tick_moment(device, tick), start_s = tick_moment(device, tick - 1);
    if (kind == AVERAGE)
        start_s = end_s - device->average_s;
    else if (device->duty_s > 0)
        start_s = end_s - device->duty_s;
    return device->gain * mean(curve, start_s, end_s);
}
