// Entry points for NVRTC.
#include "cell_backward.h"

KERNEL __launch_bounds__(CREWS *CREW_THREADS, 1) cell_forward_kernel(const __grid_constant__ Cell cell) { run_forward(cell); }
KERNEL __launch_bounds__(CREWS *CREW_THREADS, 1) cell_backward_kernel(const __grid_constant__ Cell cell) { run_backward(cell); }

// Sizes for build.py, written by one thread: mail words of a team, shared bytes of each pass, units of a warp,
// numbers of a record.
KERNEL sizes_kernel(int *sizes) {
    sizes[0] = MAIL_WORDS;
    sizes[1] = FORWARD_WEIGHT_BYTES + REST_BYTES;
    sizes[2] = BACKWARD_WEIGHT_BYTES + REST_BYTES;
    sizes[3] = ITEMS;
    sizes[4] = RECORD_SIZE;
}
