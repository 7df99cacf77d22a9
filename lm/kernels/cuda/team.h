// Teams of the persistent kernels: who solves which sequences, and how the blocks of a team exchange
// vectors and sums.
//
// A group is a set of d / CHANNELS blocks. Each block has CHANNELS channels of all vectors and, in shared
// memory, the entries of W_y for them. A block has CREWS crews of CREW_THREADS threads; the crews with the
// same number in all blocks of a group are a team. A team solves up to SEQUENCES sequences, token by
// token. Teams never exchange anything.
//
// A warp works on units of eight channels of one sequence. Lane 4 i + q has channel i of the unit and
// its states 4 q … 4 q + 3: `channel` is i, `quarter` is q. Unit j of a crew belongs to sequence
// j / UNITS. A warp has ITEMS units: j = item · WARPS + warp.
//
// All sums have a fixed order, so the bits of a sequence depend neither on the batch nor on timing.

#pragma once

#include "cell_map.h"
#include "cell_root.h"
#include "fabric.h"

constexpr int D_INNER = FPRNN_D_INNER;    // d: channels of the layer, a multiple of CHANNELS
constexpr int CHANNELS = FPRNN_CHANNELS;  // of a block, a multiple of 16
constexpr int WARPS = FPRNN_WARPS;        // of a crew
constexpr int CREWS = FPRNN_CREWS;        // of a block
constexpr int REFLECTIONS = FPRNN_REFLECTIONS;            // r
constexpr int BLOCKS = D_INNER / CHANNELS;                // of a group
constexpr int SOURCES = (BLOCKS + WARPS - 1) / WARPS;     // blocks of which one warp receives the vectors
constexpr int STATES = 16, SEQUENCES = 8, CREW_THREADS = 32 * WARPS;
constexpr int UNITS = CHANNELS / 8;
constexpr int ITEMS = (UNITS * SEQUENCES + WARPS - 1) / WARPS;
constexpr int MMA_ROWS = 16;                              // rows of W_y that one matrix instruction multiplies
constexpr int SMALL_ROWS = REFLECTIONS + 2 * STATES;      // rows of W_y for the gates, B and C
constexpr int SMALL_ROWS_PER_BLOCK = (SMALL_ROWS + BLOCKS - 1) / BLOCKS;
constexpr int SMALL_ROW_WORDS = (SMALL_ROWS_PER_BLOCK * SEQUENCES + 2) / 3;  // of one block
constexpr int SUM_SOURCES = (BLOCKS + 7) / 8;             // blocks whose sums one lane adds
constexpr int PAIRS = REFLECTIONS * (REFLECTIONS + 1) / 2;  // of reflections (i, j) with j ≤ i
// Entries that a block sends of a sequence's vector: of y forward, of the gradient of all vectors backward.
constexpr int Y_ENTRIES = CHANNELS, D_ROW_ENTRIES = REFLECTIONS * CHANNELS;
static_assert(D_INNER % CHANNELS == 0 && CHANNELS % 16 == 0 && SMALL_ROWS_PER_BLOCK <= MMA_ROWS);
constexpr float LOG2_E = 1.44269504f;
constexpr int SILU = 0, RELU = 1;
// Return the index of a symmetric matrix' entry in its lower triangle, row by row.
constexpr int pair_index(int i, int j) { return i < j ? j * (j + 1) / 2 + i : i * (i + 1) / 2 + j; }
// Return the entries of a row of the weight in shared memory. Eight more avoid bank conflicts.
constexpr int row_stride(int entries) { return BLOCKS * entries + 8; }
// Return the words of a lane for the `entries` of one block: a word has three pairs, a lane two of 16 entries.
constexpr int count_vector_words(int entries) { return (2 * (entries / 16) + 2) / 3; }
struct alignas(16) Quad {  // a lane's four states, loaded and stored in one access
    float value[4];
};
constexpr uint32_t NAN_BITS = 0x7fc00000;

// Numbers of a token that the forward pass writes for the backward pass; those from THETA to SUM_NM for
// each reflection. v is the vector of a reflection after its activation, w the norm's weight, n the
// normalized output, m = g γ v; s, φ, T and x̃ are those of lm/kernels/cell_arguments.py, θ = T (s − U x)
// divided by LENGTH.
enum Record {
    THETA,                            // θ, in x̃ = x + Σ θ v
    LENGTH = THETA + REFLECTIONS,     // max(‖v‖, eps)
    U_X = LENGTH + REFLECTIONS,       // u·x with u = v / LENGTH
    U_Y = U_X + REFLECTIONS,          // u·y
    DISTANCE = U_Y + REFLECTIONS,     // s − u·x
    MEAN_U = DISTANCE + REFLECTIONS,  // mean of w u; 0 for RMSNorm
    ALONG_U = MEAN_U + REFLECTIONS,   // mean of w u n
    SUM_M = ALONG_U + REFLECTIONS,    // Σ m / LENGTH
    SUM_NM = SUM_M + REFLECTIONS,     // Σ n m / LENGTH
    SLOPE = SUM_NM + REFLECTIONS,     // z_u with φ′(s) = z_uᵀ T, (r,r) row by row
    GRAM = SLOPE + REFLECTIONS * REFLECTIONS,  // u_i·u_j, by pair_index
    MEAN = GRAM + PAIRS,              // of the output before the norm; 0 for RMSNorm
    INVERSE,                          // 1 / √(variance + ε)
    BC,                               // B·C
    B_LENGTH,                         // max(‖B‖, eps) before its normalization; 1 if B and C are not normalized
    C_LENGTH,                         // the same of C
    RECORD_SIZE
};

// One layer. Shapes: b sequences, l tokens, d channels, n states, K columns of raw. Every field has
// eight bytes; interface.py lists the same names in the same order.
struct Cell {
    int64_t b, first_sequence, length, columns;  // the launch begins at sequence `first_sequence`
    int64_t team_sequences, chunk;                  // most sequences of a team; tokens of a chunk
    int64_t vectors, gates, B, C;                   // first columns of the parts of a row
    int64_t act, sequential, layer_norm, bc_norm;  // sequential: householder, otherwise dplr
    double scale, eps, kappa, norm_eps;
    const uint16_t *raw, *weight;               // (b,l,K), W_y (K,d); in bf16
    const float *x, *dt, *A;                    // (b,l,d), (b,l,d), (n,d)
    const float *keep, *gate;                   // (b,l), (b,l,d); null: 1
    const float *D, *norm_weight, *norm_bias;   // (d); null: 0, 1, 0
    const float *y0, *h0;                       // (b,d), (b,n,d); null: 0
    float *y, *state;                           // (b,l,d), (b,n,d)
    uint8_t *outcome;                           // (b,l): bits of Outcome in cell_equation.h
    // Written for the backward pass, null if none follows: raw + W_y y_{t−1}; records; B and C after
    // their normalization; the state before each chunk.
    uint16_t *rows;                             // (b,l,K)
    float *records, *units, *checkpoints;       // (b,l,RECORD_SIZE), (b,l,2,n), (b,chunks,n,d)
    const float *grad_y;                        // (b,l,d)
    float *largest;                             // (b): largest ‖λ_t‖ (cell_arguments.py, `adjoint`)
    uint16_t *d_raw;                            // (b,l,K)
    float *dx, *ddt, *d_gate;                   // (b,l,d)
    float *dA, *dD, *d_weight, *d_bias;         // (b,n,d), (b,d), (b,d), (b,d)
    float *H;                                   // states of one chunk of each team, after their decay
    Word *mail;                                 // zeros at launch
    volatile uint8_t *alarm;                        // not 0 after a wait that took too long
};

DEVICE float activate(float value, int act) {
    if (act == SILU) return value / (1 + exp2_of(-LOG2_E * value));
    return act == RELU ? (value < 0 ? 0 : value) : value;
}
DEVICE float activate_grad(float value, int act) {
    if (act == RELU) return value > 0 ? 1 : 0;
    if (act != SILU) return 1;
    const float gate = 1 / (1 + exp2_of(-LOG2_E * value));
    return gate * (1 + value * (1 - gate));
}
// Return `value`, or `bound` if `value` is below it.
DEVICE float at_least(float value, float bound) { return value < bound ? bound : value; }
// Sum over the four lanes of a channel.
DEVICE float sum_quarters(float value) {
    value += shuffle_xor(value, 1);
    return value + shuffle_xor(value, 2);
}
// Sum over the eight channels of a unit.
DEVICE float sum_channels(float value) {
    for (int mask = 4; mask < 32; mask *= 2) value += shuffle_xor(value, mask);
    return value;
}
// Sum four values over the channels of a unit. The lanes of channel i return the sum of value i % 4.
DEVICE float sum_four_over_channels(const float (&value)[4], int channel) {
    const bool odd = channel & 1, upper = channel & 2;
    float low = odd ? value[1] : value[0], high = odd ? value[3] : value[2];
    low += shuffle_xor(odd ? value[0] : value[1], 4);
    high += shuffle_xor(odd ? value[2] : value[3], 4);
    float sum = upper ? high : low;
    sum += shuffle_xor(upper ? low : high, 8);
    return sum + shuffle_xor(sum, 16);
}

// Sum terms over the channels of a unit. Lane q of a channel sums the terms q, q + 4, …
template <int TERMS>
DEVICE void sum_terms(const float (&term)[TERMS], int quarter, int channel, float *sums) {
#pragma unroll
    for (int first = 0; first < TERMS; first += 4) {
        const auto term_of = [&](int q) { return term[first + q < TERMS ? first + q : first]; };
        const float value = quarter == 0 ? term_of(0) : quarter == 1 ? term_of(1) : quarter == 2 ? term_of(2) : term_of(3);
        const float sum = sum_channels(value);
        if (channel == 0 && first + quarter < TERMS) sums[first + quarter] = sum;
    }
}
// Return value + Σ_i θ_i vector_i of a channel: x̃ from x and v, or the output before the norm from f and m.
DEVICE float add_reflections(float value, const float *theta, const float (&vector)[REFLECTIONS]) {
    for (int i = 0; i < REFLECTIONS; ++i) value += theta[i] * vector[i];
    return value;
}

// Wait until the word at `from` is that of `step`, and return it. `word` was loaded from there earlier.
DEVICE Word await_word(const Word *from, uint32_t step, Word word, volatile uint8_t *alarm, bool &has_timed_out) {
    if (word.step != step && !has_timed_out) {
        Timeout timeout;
        do {
            word = load_word(from);
            if (word.step == step) break;
            has_timed_out = timeout.check(alarm);
        } while (!has_timed_out);
    }
    return word;
}

// The parts of a team's mail.
struct Mailbox {
    Word *vectors;     // y forward, the gradients of the row's vectors backward
    Word *small_rows;  // forward only
    Word *sums;
    Word *late_sums;   // backward only: the second sums of a token
};
// Sums over channels of a sequence: see the enumerations in cell_forward.h and cell_backward.h.
constexpr int FORWARD_SUMS = 2 + 6 * REFLECTIONS + 3 * PAIRS;
constexpr int BACKWARD_SUMS = 3 + 2 * REFLECTIONS + STATES, LATE_SUMS = 1 + STATES;
constexpr int max_of(int a, int b) { return a < b ? b : a; }
constexpr int count_sum_words(int sums) { return (sums + 2) / 3; }  // of a sequence and block
constexpr int FORWARD_SUM_WORDS = count_sum_words(FORWARD_SUMS), LATE_SUM_WORDS = count_sum_words(LATE_SUMS);
constexpr int BACKWARD_SUM_WORDS = count_sum_words(BACKWARD_SUMS);
constexpr int SUM_WORDS = max_of(FORWARD_SUM_WORDS, BACKWARD_SUM_WORDS);
constexpr int MAIL_VECTOR_WORDS = BLOCKS * count_vector_words(D_ROW_ENTRIES) * 32;  // of a team
constexpr int MAIL_WORDS =
    MAIL_VECTOR_WORDS + BLOCKS * (SMALL_ROW_WORDS + SEQUENCES * (SUM_WORDS + LATE_SUM_WORDS));

// Shared memory: the block's entries of W_y, `rates`, and a CrewMemory per crew.
constexpr int FIRST_LATE_TOTAL = 3 * BACKWARD_SUM_WORDS;  // in `totals`
constexpr int TOTALS = max_of(3 * FORWARD_SUM_WORDS, FIRST_LATE_TOTAL + 3 * LATE_SUM_WORDS);
constexpr int SCALARS = 2 + 5 * REFLECTIONS + PAIRS;
struct CrewMemory {
    // Of a product with W_y: each warp's part of its sums. Five more columns avoid bank conflicts.
    float parts[WARPS][SEQUENCES][REFLECTIONS * CHANNELS + 5];
    float small[SEQUENCES][SMALL_ROWS + 2];        // gates, B, C of a row; or their gradients
    float unit_sums[SEQUENCES * UNITS][3 * SUM_WORDS];  // over the channels of a unit
    double totals[SEQUENCES][TOTALS];              // sums over all channels, then the late ones
    float record[SEQUENCES][RECORD_SIZE];
    float scalars[SEQUENCES][SCALARS];             // by Scalar in cell_backward.h
    uint16_t vector[SEQUENCES][D_ROW_ENTRIES];     // this block's part of the vector to send, in bf16
    int has_timed_out;                             // of any thread of the crew
};
constexpr int round_up_to_16(int bytes) { return (bytes + 15) / 16 * 16; }
constexpr int FORWARD_ROWS = REFLECTIONS * CHANNELS + SMALL_ROWS_PER_BLOCK;
constexpr int FORWARD_WEIGHT_BYTES = round_up_to_16(FORWARD_ROWS * row_stride(Y_ENTRIES) * 2);
constexpr int BACKWARD_WEIGHT_BYTES =
    round_up_to_16(CHANNELS * (row_stride(D_ROW_ENTRIES) + SMALL_ROWS) * 2);
constexpr int REST_BYTES = CREWS * int(sizeof(CrewMemory)) + CHANNELS * STATES * 4;

// One thread's view of its team.
struct Member {
    int block, crew;                               // `block` within the group
    int thread, warp, lane, channel, quarter;      // `thread` within the crew
    int first_sequence, sequences;                 // of the team: its first one, and how many it solves
    bool has_timed_out = false;                    // a word did not arrive in time
    CrewMemory *memory;
    uint16_t *weight;                              // rows of row_stride(…) entries
    float *rates;                                  // A · log2 e of the block's channels, (CHANNELS, STATES)
    Mailbox mail;
    volatile uint8_t *alarm;

    DEVICE Member(const Cell &cell, int weight_bytes) {
        alarm = cell.alarm;
        block = block_index() % BLOCKS;
        const int warp_in_block = uniform(thread_in_block() / 32);
        crew = warp_in_block / WARPS, warp = warp_in_block % WARPS;
        lane = thread_in_block() % 32, channel = lane / 4, quarter = lane % 4;
        thread = warp * 32 + lane;
        const int team = block_index() / BLOCKS * CREWS + crew;
        first_sequence = cell.first_sequence + team * cell.team_sequences;
        const int remaining = int(cell.b) - first_sequence;  // 0 or less: the team has no work
        sequences = remaining < cell.team_sequences ? remaining : int(cell.team_sequences);
        char *shared = shared_memory();
        weight = reinterpret_cast<uint16_t *>(shared);
        rates = reinterpret_cast<float *>(shared + weight_bytes);
        memory = reinterpret_cast<CrewMemory *>(rates + CHANNELS * STATES) + crew;
        mail.vectors = cell.mail + team * MAIL_WORDS;
        mail.small_rows = mail.vectors + MAIL_VECTOR_WORDS;
        mail.sums = mail.small_rows + BLOCKS * SMALL_ROW_WORDS;
        mail.late_sums = mail.sums + BLOCKS * SEQUENCES * SUM_WORDS;
        if (thread == 0) memory->has_timed_out = 0;
        for (int i = thread_in_block(); i < CHANNELS * STATES; i += CREWS * CREW_THREADS)
            rates[i] = LOG2_E * cell.A[i % STATES * D_INNER + block * CHANNELS + i / STATES];
    }
    DEVICE void sync() const { sync_crew<CREW_THREADS>(crew); }
    DEVICE int unit_of(int item) const { return item * WARPS + warp; }
    DEVICE int sequence_of(int item) const { return unit_of(item) / UNITS; }
    DEVICE int local_channel_of(int item) const { return unit_of(item) % UNITS * 8 + channel; }
    DEVICE int channel_of(int item) const { return block * CHANNELS + local_channel_of(item); }
    // Index in (b,l) of token t of the team's s-th sequence, and index in (b,n,d) of the lane's j-th state
    // of an item. cuda_cell.py refuses tensors of 2³² or more entries: wider indices would need twice the
    // registers.
    DEVICE uint32_t token_index(const Cell &cell, int s, int t) const {
        return (first_sequence + s) * uint32_t(cell.length) + t;
    }
    DEVICE uint32_t state_entry(int item, int j) const {
        return ((first_sequence + sequence_of(item)) * STATES + 4 * quarter + j) * D_INNER + channel_of(item);
    }
    // Return true in all threads of the crew if any of them has timed out. Contains a barrier.
    DEVICE bool has_any_timed_out() {
        if (has_timed_out) memory->has_timed_out = 1;
        sync();
        return memory->has_timed_out;
    }

    // Send memory->vector to all blocks, in the order in which multiply_rows needs it: lane 4 i + q of a
    // warp multiplies, of sequence i and of every 16 entries, the pairs that begin at 2 q and 2 q + 8.
    template <int ENTRIES> DEVICE void send_vector(uint32_t step) const {
        constexpr int WORDS = count_vector_words(ENTRIES);
        for (int i = thread; i < WORDS * 32; i += CREW_THREADS) {
            const int s = i % 32 / 4;
            if (s >= sequences) continue;
            Word word = {{0, 0, 0}, step};
            for (int k = 0; k < 3; ++k) {
                const int pair = 3 * (i / 32) + k;
                if (pair >= ENTRIES / 8) break;
                const uint16_t *from = memory->vector[s] + pair / 2 * 16 + pair % 2 * 8 + i % 4 * 2;
                word.value[k] = from[0] | uint32_t(from[1]) << 16;
            }
            store_word(mail.vectors + block * WORDS * 32 + i, word);
        }
    }
    // Receive the parts of the vectors that this warp multiplies: those of the blocks warp, warp +
    // WARPS, …
    template <int WORDS> DEVICE void receive_vectors(uint32_t step, Word (&words)[SOURCES][WORDS]) {
#pragma unroll
        for (int i = 0; i < SOURCES; ++i)  // all loads are on their way before the first wait
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                words[i][w] = {};
                if (has_vector(i)) words[i][w] = load_word(vector_word<WORDS>(i, w));
            }
#pragma unroll
        for (int i = 0; i < SOURCES; ++i)
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                if (has_vector(i))
                    words[i][w] = await_word(vector_word<WORDS>(i, w), step, words[i][w], alarm, has_timed_out);
    }
    DEVICE bool has_vector(int i) const { return i * WARPS + warp < BLOCKS && channel < sequences; }
    template <int WORDS> DEVICE const Word *vector_word(int i, int w) const {
        return mail.vectors + ((i * WARPS + warp) * WORDS + w) * 32 + lane;
    }

    // Multiply the rows row … row + rows − 1 of the weight (at most MMA_ROWS) with the vectors, which have ENTRIES
    // of each block. Each warp writes the sums over its source blocks into memory->parts, from row `to` on.
    template <int ENTRIES>
    DEVICE void multiply_rows(const Word (&words)[SOURCES][count_vector_words(ENTRIES)], int row, int rows,
                              int to) const {
        constexpr int STRIDE = row_stride(ENTRIES);
        sync_warp();  // the lanes left their waits at different times
        float sum[4] = {};
        const uint16_t *fragment = weight + (row + channel) * STRIDE + 2 * quarter;
#pragma unroll
        for (int i = 0; i < SOURCES; ++i) {
            const int source = i * WARPS + warp;
            if (source >= BLOCKS) continue;
#pragma unroll
            for (int mma = 0; mma < ENTRIES / 16; ++mma) {
                uint32_t left[4] = {};
                for (int k = 0; k < 4; ++k)
                    if (channel + k % 2 * 8 < rows)
                        left[k] = *reinterpret_cast<const uint32_t *>(
                            fragment + k % 2 * 8 * STRIDE + source * ENTRIES + 16 * mma + k / 2 * 8);
                const int pair = 2 * mma;
                const uint32_t right[2] = {words[i][pair / 3].value[pair % 3],
                                           words[i][(pair + 1) / 3].value[(pair + 1) % 3]};
                multiply(sum, left, right);
            }
        }
        for (int k = 0; k < 4; ++k)
            if (channel + k / 2 * 8 < rows)
                memory->parts[warp][2 * quarter + k % 2][to + channel + k / 2 * 8] = sum[k];
    }
    // Return the product of a row, summed over the parts of the warps `from`, `from` + `stride`, …
    DEVICE float sum_parts(int row, int s, int from, int stride) const {
        float sum = 0;
        for (int w = from; w < WARPS; w += stride) sum += memory->parts[w][s][row];
        return sum;
    }

    // Send the block's sums, which are memory->unit_sums added over the units of each sequence.
    template <int WORDS> DEVICE void send_sums(Word *to, uint32_t step) const {
        for (int i = thread; i < sequences * WORDS; i += CREW_THREADS) {
            const int s = i / WORDS, entry = i % WORDS * 3;
            float sum[3] = {};
            for (int unit = 0; unit < UNITS; ++unit)
                for (int k = 0; k < 3; ++k) sum[k] += memory->unit_sums[s * UNITS + unit][entry + k];
            const Word word = {{float_to_bits(sum[0]), float_to_bits(sum[1]), float_to_bits(sum[2])}, step};
            store_word(to + (block * SEQUENCES + s) * WORDS + i % WORDS, word);
        }
    }
    // Add the sums of all blocks into memory->totals, from the entry `first` of a sequence on. Eight lanes share
    // a word: each adds every eighth block.
    template <int WORDS> DEVICE void receive_sums(const Word *from, uint32_t step, int first) {
        const int part = thread % 8;
        const int passes = (sequences * WORDS + CREW_THREADS / 8 - 1) / (CREW_THREADS / 8);
        for (int pass = 0; pass < passes; ++pass) {
            const int i = pass * (CREW_THREADS / 8) + thread / 8;
            const bool is_word = i < sequences * WORDS;
            const Word *first_word = from + i;  // of block 0
            Word words[SUM_SOURCES] = {};
            double sum[3] = {};
#pragma unroll
            for (int j = 0; j < SUM_SOURCES; ++j)
                if (is_word && 8 * j + part < BLOCKS)
                    words[j] = load_word(first_word + (8 * j + part) * SEQUENCES * WORDS);
#pragma unroll
            for (int j = 0; j < SUM_SOURCES; ++j) {
                if (!is_word || 8 * j + part >= BLOCKS) continue;
                const Word *place = first_word + (8 * j + part) * SEQUENCES * WORDS;
                const Word word = await_word(place, step, words[j], alarm, has_timed_out);
                for (int k = 0; k < 3; ++k) sum[k] += bits_to_float(word.value[k]);
            }
            for (int k = 0; k < 3; ++k) {
                for (int mask = 1; mask < 8; mask *= 2) sum[k] += shuffle_xor(sum[k], mask);
                if (part == 0 && is_word) memory->totals[i / WORDS][first + i % WORDS * 3 + k] = sum[k];
            }
        }
    }
    // Return the sequence whose equation this thread solves; not below `sequences` in most threads.
    // Consecutive sequences are in different warps.
    DEVICE int find_solver_sequence() const { return lane * WARPS + warp; }
};
