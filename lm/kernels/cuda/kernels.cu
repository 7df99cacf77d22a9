// Entry points for NVRTC.
#include "cell_backward.h"

KERNEL __launch_bounds__(CREWS *CREW_THREADS, 1) cell_forward_kernel(const __grid_constant__ Cell cell) { run_forward(cell); }
KERNEL __launch_bounds__(CREWS *CREW_THREADS, 1) cell_backward_kernel(const __grid_constant__ Cell cell) { run_backward(cell); }

// Sizes that build.py reads: mail words of a team, shared bytes of each pass, units of a warp.
extern "C" __device__ const int SIZES[4] = {MAIL_WORDS, FORWARD_WEIGHT_BYTES + REST_BYTES,
                                            BACKWARD_WEIGHT_BYTES + REST_BYTES, ITEMS};
