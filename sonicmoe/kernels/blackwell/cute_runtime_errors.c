// The two error reporters that kernels exported from CuTe DSL call, so that a cached kernel needs
// no CuTe DSL library to load. Signatures as in the package's CuteDSLRuntime.h.
#include <stdint.h>
#include <stdio.h>

typedef void (*SetError)(const char* kind, const char** parts, int32_t count);

void CuteDSLRT_TVMFFISetRaisedCudaError(SetError set_error, int32_t code) {
  char text[96];
  if (!set_error) return;
  snprintf(text, sizeof text, "CUDA error %d while loading or launching a cached CuTe kernel",
           (int)code);
  const char* parts[] = {text};
  set_error("RuntimeError", parts, 1);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    SetError set_error, int32_t grid_x, int32_t grid_y, int32_t grid_z, int32_t block_x,
    int32_t block_y, int32_t block_z, int32_t block_threads, int64_t dynamic_smem, int32_t device,
    int32_t max_threads, int32_t max_block_x, int32_t max_block_y, int32_t max_block_z,
    int32_t max_grid_x, int32_t max_grid_y, int32_t max_grid_z, int32_t max_smem,
    int32_t max_smem_optin, const char* violation, const char* source_file, int32_t source_line,
    int32_t source_col, int32_t source_end_col) {
  char text[512];
  (void)max_block_x, (void)max_block_y, (void)max_block_z, (void)max_grid_x, (void)max_grid_y,
      (void)max_grid_z;
  (void)max_smem, (void)source_col, (void)source_end_col;
  if (!set_error) return;
  snprintf(text, sizeof text,
           "kernel launch refused on device %d (%s): grid (%d, %d, %d), block (%d, %d, %d) = %d "
           "threads of %d, dynamic "
           "shared memory %lld bytes of %d, at %s:%d",
           (int)device, violation ? violation : "limit exceeded", (int)grid_x, (int)grid_y,
           (int)grid_z, (int)block_x, (int)block_y, (int)block_z, (int)block_threads,
           (int)max_threads, (long long)dynamic_smem, (int)max_smem_optin,
           source_file ? source_file : "?", (int)source_line);
  const char* parts[] = {text};
  set_error("RuntimeError", parts, 1);
}
