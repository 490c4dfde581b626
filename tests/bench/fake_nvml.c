/* NVML of one GPU that draws WATTS: its energy counter follows the clock of the host, in steps of
 * 20 ms as that of a real driver. -DWITHOUT_COUNTER refuses the counter, -DOLD lacks it, -DLOST
 * loses the GPU at the second reading of it. Types are those of nvml.h. */
#include <string.h>
#include <time.h>

#define UUID "GPU-00112233-4455-6677-8899-aabbccddeeff"
#define WATTS 700
enum { INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };

static int users, readings, gpu;

int nvmlInit_v2(void) { users++; return 0; }
int nvmlShutdown(void) { users--; return 0; }
int fake_users(void) { return users; }

const char *nvmlErrorString(int code) {
    return code == NOT_SUPPORTED ? "Not Supported" : code == NOT_FOUND ? "Not Found" : "GPU is lost";
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, UUID)) return NOT_FOUND;
    *handle = &gpu;
    return 0;
}

int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *mhz) {
    if (handle != &gpu || type != 1) return INVALID_ARGUMENT;
    *mhz = 1530;
    return 0;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
    if (handle != &gpu) return INVALID_ARGUMENT;
    *milliwatts = 700000;
    return 0;
}

#ifndef OLD
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    struct timespec now;
    if (handle != &gpu) return INVALID_ARGUMENT;
#ifdef WITHOUT_COUNTER
    return NOT_SUPPORTED;
#endif
#ifdef LOST
    if (readings++) return GPU_IS_LOST;
#endif
    clock_gettime(CLOCK_MONOTONIC, &now);
    /* Past 32 bits, as after two hours of a real GPU. */
    *millijoules = (1ULL << 33)
        + WATTS * (unsigned long long)(now.tv_sec * 1000 + now.tv_nsec / 20000000 * 20);
    return 0;
}
#endif
