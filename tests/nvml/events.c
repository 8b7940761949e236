/* Events: critical errors (Xid), of which the faults file tells when they happen. */

#include "traced.h"

enum { XID = 8 };

struct event_set {
    double registered_s[MAX_DEVICES]; /* -1: is not */
};

struct event_data {
    struct device *device;
    unsigned long long type, data;
    unsigned int instance, compute_instance;
};

int nvmlEventSetCreate(struct event_set **set)
{
    count_call(__func__);
    if (!initialized)
        return UNINITIALIZED;
    *set = malloc(sizeof **set);
    for (int i = 0; *set && i < MAX_DEVICES; i++)
        (*set)->registered_s[i] = -1;
    return *set ? SUCCESS : MEMORY_ERROR;
}

int nvmlEventSetFree(struct event_set *set)
{
    count_call(__func__);
    free(set);
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(struct device *device, unsigned long long *types)
{
    int result = enter_whole(__func__, device, "events.types", NULL);
    if (result == SUCCESS)
        *types = XID;
    return result;
}

int nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, struct event_set *set)
{
    int result = enter_whole(__func__, device, "events.register", NULL);
    if (result)
        return result;
    if (types & ~(unsigned long long)XID)
        return NOT_SUPPORTED;
    if (types)
        set->registered_s[device - devices] = now_s();
    return SUCCESS;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned int timeout_ms)
{
    double until_s = now_s() + timeout_ms / 1e3;
    struct event event;
    count_call(__func__);
    if (!initialized)
        return UNINITIALIZED;
    for (int i = 0; i < num_devices; i++) {
        int result = set->registered_s[i] < 0 ? SUCCESS : enter(NULL, &devices[i], "events.wait", NULL);
        if (result)
            return result;
    }
    while (!take_event(set->registered_s, &event)) {
        double left_s = until_s - now_s();
        if (left_s <= 0)
            return TIMEOUT;
        sleep_s(fmin(left_s, 0.002));
    }
    *data = (struct event_data){&devices[event.position], XID, event.number, UINT32_MAX, UINT32_MAX};
    return SUCCESS;
}
