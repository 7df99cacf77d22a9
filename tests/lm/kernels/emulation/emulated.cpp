// The persistent kernels compiled for fabric_cpu.h; emulated_cell.py builds and calls them.
#include "cell_backward.h"

extern "C" {
void set_timeouts(int are_on) { fabric::waits_time_out = are_on; }
int cell_bytes() { return sizeof(Cell); }
void get_sizes(int *sizes) {
    const int forward_bytes = FORWARD_WEIGHT_BYTES + REST_BYTES, backward_bytes = BACKWARD_WEIGHT_BYTES + REST_BYTES;
    const int all[] = {MAIL_WORDS, forward_bytes, backward_bytes, ITEMS, RECORD_SIZE};
    std::memcpy(sizes, all, sizeof all);
}
// Run a pass; return 0, or 1 with the reason.
int run(const Cell *p, int groups, int is_backward, uint64_t seed, char *reason, int reason_bytes) {
    const int shared_bytes = (is_backward ? BACKWARD_WEIGHT_BYTES : FORWARD_WEIGHT_BYTES) + REST_BYTES;
    const auto kernel = [&] { is_backward ? run_backward(*p) : run_forward(*p); };
    try {
        fabric::run(groups * BLOCKS, CREWS, CREW_THREADS, shared_bytes, seed, kernel);
        return 0;
    } catch (const std::exception &error) {
        std::snprintf(reason, reason_bytes, "%s", error.what());
        return 1;
    }
}
}
