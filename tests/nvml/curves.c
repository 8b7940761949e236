/* Curves of CLOCK_MONOTONIC and their integrals; tests/nvml_library.py has the same, operation by operation. */

#include "traced.h"

#include <pthread.h>

/* Sums of the 32-bit draws of a steps curve: total[i] is that of the periods first ... first + i - 1. */
struct sums {
    int64_t first;
    size_t known, room;
    uint64_t *total;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t splitmix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

static uint64_t draw32(uint64_t seed, int64_t number) { return splitmix64(splitmix64(seed) + (uint64_t)number) >> 32; }

double draw(uint64_t seed, int64_t number) { return (double)draw32(seed, number) / 4294967296.0; }

void parse_curve(struct curve *curve, const char *text)
{
    static const char *const shapes[] = {[FLAT] = "flat", "square", "sine", "bursts", "steps"};
    const char *numbers = strchr(text, ':');
    unsigned long long seed = 0;
    forget_curve(curve);
    memset(curve, 0, sizeof *curve);
    curve->shape = FLAT;
    for (int shape = FLAT; numbers && shape <= STEPS; shape++)
        if (strncmp(text, shapes[shape], (size_t)(numbers - text)) == 0)
            curve->shape = shape;
    sscanf(numbers ? numbers + 1 : text, "%lf:%lf:%lf:%lf:%llu", &curve->low, &curve->high, &curve->period_s,
           &curve->duty, &seed);
    curve->seed = seed;
}

void forget_curve(struct curve *curve)
{
    if (curve->sums)
        free(curve->sums->total);
    free(curve->sums);
    curve->sums = NULL;
}

/* The number of the period that t is in, and how far in: as Python's divmod does it. */
static int64_t period(double t, double period_s, double *rest)
{
    *rest = fmod(t, period_s);
    int64_t number = (int64_t)floor((t - *rest) / period_s + 0.5);
    if (*rest < 0) /* before the clock began */
        *rest += period_s, number--;
    return number;
}

static double burst_start(const struct curve *curve, int64_t number)
{
    return draw(curve->seed, number) * (1 - curve->duty) * curve->period_s;
}

double at(const struct curve *curve, double t)
{
    double rest;
    int64_t number;
    switch (curve->shape) {
    case NONE:
    case FLAT:
        return curve->low;
    case SQUARE:
        period(t, curve->period_s, &rest);
        return rest < curve->duty * curve->period_s ? curve->high : curve->low;
    case SINE:
        return (curve->low + curve->high) / 2 +
               (curve->high - curve->low) / 2 * sin(2 * M_PI * t / curve->period_s);
    case BURSTS:
        number = period(t, curve->period_s, &rest);
        rest -= burst_start(curve, number);
        return 0 <= rest && rest < curve->duty * curve->period_s ? curve->high : curve->low;
    case STEPS:
        number = period(t, curve->period_s, &rest);
        return curve->low + (curve->high - curve->low) * draw(curve->seed, number);
    }
    return 0;
}

static double since_zero(const struct curve *curve, double t)
{
    if (curve->shape == NONE || curve->shape == FLAT)
        return curve->low * t;
    if (curve->shape == SINE) {
        double turn = 2 * M_PI / curve->period_s;
        return (curve->low + curve->high) / 2 * t + (curve->high - curve->low) / 2 * (1 - cos(turn * t)) / turn;
    }
    double rest, burst_s = curve->duty * curve->period_s;
    int64_t whole = period(t, curve->period_s, &rest);
    if (curve->shape == BURSTS)
        rest = fmax(0, rest - burst_start(curve, whole));
    double high_s = (double)whole * curve->duty * curve->period_s + fmin(rest, burst_s);
    return curve->high * high_s + curve->low * (t - high_s);
}

/* The sum of the draws of the periods from one on, up to but without another. */
static uint64_t sum_of_draws(struct curve *curve, int64_t from, int64_t until)
{
    int64_t lowest = from < until ? from : until, highest = from < until ? until : from;
    pthread_mutex_lock(&lock);
    struct sums *sums = curve->sums;
    if (!sums || lowest < sums->first) {
        forget_curve(curve);
        sums = curve->sums = calloc(1, sizeof *sums);
        sums->first = lowest;
        sums->known = 1;
        sums->room = 4096;
        sums->total = calloc(sums->room, sizeof *sums->total);
    }
    while (sums->first + (int64_t)sums->known <= highest) {
        if (sums->known == sums->room)
            sums->total = realloc(sums->total, (sums->room *= 2) * sizeof *sums->total);
        uint64_t before = sums->total[sums->known - 1];
        sums->total[sums->known] = before + draw32(curve->seed, sums->first + (int64_t)sums->known - 1);
        sums->known++;
    }
    uint64_t sum = sums->total[until - sums->first] - sums->total[from - sums->first];
    pthread_mutex_unlock(&lock);
    return sum;
}

double integral(struct curve *curve, double t0, double t1)
{
    if (curve->shape != STEPS)
        return since_zero(curve, t1) - since_zero(curve, t0);
    double rest0, rest1;
    int64_t first = period(t0, curve->period_s, &rest0), last = period(t1, curve->period_s, &rest1);
    double share_s = curve->period_s * ((double)(int64_t)sum_of_draws(curve, first, last) / 4294967296.0);
    share_s = share_s + rest1 * draw(curve->seed, last) - rest0 * draw(curve->seed, first);
    return curve->low * (t1 - t0) + (curve->high - curve->low) * share_s;
}

double mean(struct curve *curve, double t0, double t1)
{
    return t0 < t1 ? integral(curve, t0, t1) / (t1 - t0) : at(curve, t1);
}
