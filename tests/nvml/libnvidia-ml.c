/* An NVML whose devices follow known curves, so that everything above it runs through the real pynvml.
 *
 * The file named by NVML_TRACE has one device a line, in the order of NVML's indices:
 *
 *     system driver=570.86.15 nvml=12.570.86 cuda=12080
 *     device uuid=GPU-... bus=00000000:3B:00.0 name=Traced memory_total=85899345920 power=square:100:300:2:0.5 ...
 *     slice parent=0 uuid=MIG-... instance=1 slices=3 memory_total=...
 *
 * (each on one line; "%20" is a space).  What a line leaves out is not supported, or 0, or what stands here.
 *
 * Curves are functions of CLOCK_MONOTONIC, written SHAPE:LOW:HIGH:PERIOD:DUTY:SEED as far as needed:
 *     flat:VALUE
 *     square:LOW:HIGH:PERIOD:DUTY        high first
 *     sine:LOW:HIGH:PERIOD               upwards first
 *     bursts:LOW:HIGH:PERIOD:DUTY:SEED   as square, each burst somewhere in its period
 *     steps:LOW:HIGH:PERIOD:0:SEED       another level in each period
 *
 * What a device is:
 *     uuid bus name serial brand (14, NVIDIA) architecture (9: Hopper) module_id minor (position)
 *     power_limit_w power_limit_default_w (power_limit_w) sm_clock_max_mhz memory_total
 *     power_profiles: bits of the enforced workload power profiles, below 2^32
 *     memory_reserved: bytes, in v1 of the memory a part of what is used, in v2 beside it; unsupported: names of calls,
 *     with commas between them
 * What its sensors see, as curves in W, bytes, MHz, degrees and 0..1:
 *     power module_power memory_power memory utilization sm_clock_mhz memory_clock_mhz temperature_c
 *     and for GPM, with gpm=1: sm_activity sm_occupancy tensor_activity dram_activity
 * and as numbers: throttle (bits) ecc_corrected ecc_uncorrected processes (0), and links that it has if they are not 0:
 *     pcie_width pcie_width_max pcie_generation (also the maximum) nvlinks nvlink_errors
 * What a slice is: parent instance compute_instance slices compute_slices (slices) multiprocessors (16 a slice)
 *
 * How the sensors of power and energy work:
 *     tick_s         the counter changes at the ticks only (0: always)
 *     tick_phase_s   ticks are at phase + k tick
 *     tick_jitter_s  each tick's moment is off by up to so much either way (less than half a tick)
 *     duty_s         only the last so many seconds of each tick are measured, and stand for all of it (0: all)
 *     lag_s          the counter shows what it should have shown so long ago
 *     gain (1)       by which the counter and every power are wrong
 *     origin_s       where the counter is 0; near now with duty_s or a power of steps, whose sums begin there
 *     power_mode     exact: the power of the moment; held: the mean over what the last tick measured
 *     average_s (1)  the length of NVML's average power, which in held mode ends with the last tick
 *     power_usage    instant or average: which of the two nvmlDeviceGetPowerUsage is
 *     energy_scope   gpu or module: whose energy the counter counts
 *
 * The file of the same name with ".faults" behind it is read anew when it has changed, one fault a line:
 *
 *     TARGET CALL VERB [NUMBER [FROM [UNTIL]]]
 *
 * TARGET is a position in the trace, "init" or "*"; FROM and UNTIL are monotonic seconds.  CALL is "*" or
 *     handle index uuid name pci mig about (.serial .module .board .architecture .brand .minor) limit (.enforced
 *     .management .default) memory (.v1 .v2) utilization power (.usage, .instant and .average .gpu .module
 *     .memory) energy (.call .field) fields clocks (.sm .memory .max) temperature throttle profiles ecc (.corrected
 *     .uncorrected) processes links gpm (.support .sample .metrics) events (.wait)
 * where a name stands for all that begin with it and a dot; so it does in "unsupported".  VERB is
 *     error N      the call returns NVML's error N
 *     value N      it gives that raw number
 *     lost         the device, and its slices, are gone until NVML is initialised anew
 *     freeze T     it sees the curves as they are at T, a moment of the past or of the future
 *     hang S       it sleeps so many seconds, once in each process
 *     delay S      it sleeps so long each time
 *     spin S       it is busy so long each time
 *     serial S     it sleeps so long each time, in a lock of all processes
 *     reset T      the energy counter starts from 0 at T
 *     jump J       the energy counter reads so much higher
 *     back J       the energy counter reads so much lower
 *     event N      (CALL xid) a critical error of this number happens at FROM, once in each process; without
 *                  FROM, as soon as somebody listens
 *
 * With NVML_TRACE_CALLS in the environment, each call appends a line "PID FUNCTION" to the file of that name.
 */

#include <pthread.h>

#include "traced.h"

struct pci {
    char bus_legacy[16];
    unsigned int domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
};

struct attributes {
    unsigned int multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, slices, compute_slices;
    unsigned long long memory_mib;
};

static int give_text(const char *text, char *buffer, unsigned int length)
{
    return (unsigned int)snprintf(buffer, length, "%s", text) < length ? SUCCESS : INSUFFICIENT_SIZE;
}

/* --- the library ---------------------------------------------------------------------------------- */

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER; /* an agent opens each GPU in its own thread */

int nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    find_files();
    count_call(__func__);
    int result = enter_init();
    pthread_mutex_lock(&init_mutex);
    if (result == SUCCESS && initialized == 0)
        result = read_trace(); /* which also forgets who was lost */
    if (result == SUCCESS)
        initialized++;
    pthread_mutex_unlock(&init_mutex);
    return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    count_call(__func__);
    pthread_mutex_lock(&init_mutex);
    int result = initialized ? SUCCESS : UNINITIALIZED;
    initialized -= result == SUCCESS;
    pthread_mutex_unlock(&init_mutex);
    return result;
}

const char *nvmlErrorString(int result)
{
    static char text[32];
    snprintf(text, sizeof text, "error %d", result);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    return initialized ? give_text(driver_version, version, length) : UNINITIALIZED;
}

int nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    return initialized ? give_text(nvml_version, version, length) : UNINITIALIZED;
}

int nvmlSystemGetCudaDriverVersion(int *version) { return *version = cuda_version, SUCCESS; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* --- which device --------------------------------------------------------------------------------- */

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    count_call(__func__);
    if (!initialized)
        return UNINITIALIZED;
    *count = 0;
    for (int i = 0; i < num_devices; i++)
        *count += devices[i].parent < 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **handle)
{
    count_call(__func__);
    if (!initialized)
        return UNINITIALIZED;
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent < 0 && index-- == 0) {
            *handle = &devices[i];
            return enter(NULL, *handle, "handle", NULL);
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetMinorNumber(struct device *device, unsigned int *minor)
{
    int result = enter(__func__, device, "about.minor", NULL);
    *minor = device->minor >= 0 ? (unsigned int)device->minor : (unsigned int)(device - devices);
    return result;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **handle)
{
    count_call(__func__);
    if (!initialized)
        return UNINITIALIZED;
    for (int i = 0; i < num_devices; i++)
        if (strcmp(devices[i].uuid, uuid) == 0) {
            *handle = &devices[i];
            return enter(NULL, *handle, "handle", NULL);
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
    count_call(__func__);
    if (!initialized)
        return UNINITIALIZED;
    if (!parse_bus(bus, &wanted))
        return INVALID_ARGUMENT;
    for (int i = 0; i < num_devices; i++)
        if (devices[i].parent < 0 && parse_bus(devices[i].bus, &own) && own.domain == wanted.domain &&
            own.bus == wanted.bus && own.device == wanted.device) {
            *handle = &devices[i];
            return enter(NULL, *handle, "handle", NULL);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(struct device *device, unsigned int *index)
{
    int result = enter(__func__, device, "index", NULL);
    *index = 0;
    for (struct device *other = devices; result == SUCCESS && other < device; other++)
        *index += other->parent < 0;
    return result;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned int length)
{
    int result = enter(__func__, device, "uuid", NULL);
    return result ? result : give_text(device->uuid, uuid, length);
}

int nvmlDeviceGetName(struct device *device, char *name, unsigned int length)
{
    int result = enter(__func__, device, "name", NULL);
    return result ? result : give_text(device->name, name, length);
}

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci)
{
    int result = enter(__func__, device, "pci", NULL);
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

int nvmlDeviceGetSerial(struct device *device, char *serial, unsigned int length)
{
    int result = enter_whole(__func__, device, "about.serial", NULL);
    if (result)
        return result;
    return device->serial[0] ? give_text(device->serial, serial, length) : NOT_SUPPORTED;
}

int nvmlDeviceGetModuleId(struct device *device, unsigned int *id)
{
    int result = enter_whole(__func__, device, "about.module", NULL);
    if (result)
        return result;
    *id = (unsigned int)device->module_id;
    return device->module_id < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetBoardId(struct device *device, unsigned int *id)
{
    struct pci pci;
    int result = enter_whole(__func__, device, "about.board", NULL);
    if (result)
        return result;
    if (!parse_bus(device->bus, &pci))
        return NOT_SUPPORTED;
    *id = pci.domain << 16 | pci.bus << 8;
    return SUCCESS;
}

int nvmlDeviceGetArchitecture(struct device *device, unsigned int *architecture)
{
    int result = enter(__func__, device, "about.architecture", NULL);
    if (result == SUCCESS)
        *architecture = (unsigned int)device->architecture; /* -1: unknown, for NVML too */
    return result;
}

int nvmlDeviceGetBrand(struct device *device, unsigned int *brand)
{
    int result = enter(__func__, device, "about.brand", NULL);
    if (result == SUCCESS)
        *brand = (unsigned int)device->brand;
    return result;
}

/* --- slices --------------------------------------------------------------------------------------- */

int nvmlDeviceIsMigDeviceHandle(struct device *device, unsigned int *is_slice)
{
    int result = enter(__func__, device, "mig", NULL);
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
    int result = enter(__func__, device, "mig", NULL);
    if (result == SUCCESS)
        *current = *pending = slice(device, 0) != NULL;
    return result;
}

/* How many there could be: NVML's answer, however many there are. */
int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned int *count)
{
    int result = enter_whole(__func__, device, "mig", NULL);
    *count = result == SUCCESS && slice(device, 0) ? 7 : 0;
    while (result == SUCCESS && slice(device, *count))
        (*count)++;
    return result;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned int index, struct device **handle)
{
    int result = enter(__func__, device, "mig", NULL);
    if (result)
        return result;
    *handle = slice(device, index);
    return *handle ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *device, struct device **handle)
{
    int result = enter(__func__, device, "mig", NULL);
    if (result)
        return result;
    if (device->parent < 0)
        return INVALID_ARGUMENT;
    *handle = &devices[device->parent];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned int *id)
{
    int result = enter(__func__, device, "mig", NULL);
    if (result)
        return result;
    *id = (unsigned int)device->instance;
    return device->parent < 0 || device->instance < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(struct device *device, unsigned int *id)
{
    int result = enter(__func__, device, "mig", NULL);
    if (result)
        return result;
    *id = (unsigned int)device->compute_instance;
    return device->parent < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetAttributes_v2(struct device *device, struct attributes *attributes)
{
    int result = enter(__func__, device, "mig", NULL);
    if (result)
        return result;
    if (device->parent < 0 || device->slices <= 0)
        return NOT_SUPPORTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->slices = (unsigned int)device->slices;
    attributes->compute_slices = (unsigned int)(device->compute_slices ? device->compute_slices : device->slices);
    attributes->multiprocessors = device->multiprocessors ? (unsigned int)device->multiprocessors
                                                          : 16 * attributes->compute_slices;
    attributes->memory_mib = device->memory_total >> 20;
    return SUCCESS;
}
