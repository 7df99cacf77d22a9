// Forward pass of the exact solve, all tokens in one launch: FP-Mamba-1 with one reflection.
//
// lm/kernels/cell_arguments.py has the equations, team.h says how blocks work together. A token:
//
//   1. The state decays.
//   2. y of the previous token arrives (mail.vectors). The block multiplies its small rows of W_y
//      (gate, B, C) first and sends the results, then the rows of its own channels.
//   3. The small rows of all blocks arrive (mail.SMALL_ROWS_OF_BLOCK).
//   4. Eleven sums over channels are exchanged (mail.sums).
//   5. Every block solves the equation of every sequence of its team. All get the same bits.
//   6. y of the token is sent, and the token is added to the state.
//
// The equation and the norm need only these eleven sums: with v the vector of the reflection after
// its activation, the output before the norm is f + θ m with f = g (past + γ x) and m = g γ v.
//
// One buffer per kind of mail is enough. A block sends y_t only after it has all sums of token t, and
// a block that has sent those sums has read all of y_{t−1}. It sends the sums of t only after it has
// all of y_{t−1}, and a block that has sent y_{t−1} has read all sums of t − 1. The same holds for the
// small rows.

#pragma once

#include "team.h"

// The eleven sums over channels of one sequence, in the order of the words that carry them.
enum ForwardSum { VV, VX, F, M, FF, FM, MM, WVF, WVM, WV, VB };

// Solve the equation of a sequence and write its record, without BC and the lengths of B and C.
DEVICE int solve_sequence(const Cell &p, const double *sum, float gate_entry, float *record, float &root) {
    const double d = D_INNER, length = limit_length(sqrt(float(sum[VV])), p.eps);
    double a = p.scale / (1 + exp(-double(gate_entry)));
    if (p.kappa > 0 && a > p.kappa) a = p.kappa;
    const double u_x = sum[VX] / length, tau = a / length, k = tau * u_x;  // x̃ = x − k v + τ s v
    const double mean_f = p.layer_norm ? sum[F] / d : 0, mean_m = p.layer_norm ? sum[M] / d : 0;
    const double ff = sum[FF] / d - mean_f * mean_f, fm = sum[FM] / d - mean_f * mean_m;
    const double mm = sum[MM] / d - mean_m * mean_m;
    Equation e;
    e.alpha[0] = (sum[WVF] - mean_f * sum[WV] - k * (sum[WVM] - mean_m * sum[WV])) / length;
    e.beta[0][0] = tau / length * (sum[WVM] - mean_m * sum[WV]);
    e.delta[0] = sum[VB] / length;
    e.gamma0 = ff - 2 * k * fm + k * k * mm + p.norm_eps;
    e.gamma1[0] = tau * (fm - k * mm);
    e.gamma2[0][0] = tau * tau * mm;
    e.floor = p.norm_eps;
    e.rounding = 0x1p-23;
    double s;
    int outcome = solve<1>(e, 1, &s);
    root = float(s);
    s = root;  // the backward pass reads the rounded root
    const double theta = tau * (s - u_x), variance = ff + theta * (2 * fm + theta * mm);
    const double mean = mean_f + theta * mean_m;
    const double inverse = 1 / sqrt((variance < 0 ? 0 : variance) + p.norm_eps);
    const double wv_n = (sum[WVF] + theta * sum[WVM] - mean * sum[WV]) * inverse;
    const double n_m = (sum[FM] + theta * sum[MM] - mean * sum[M]) * inverse;
    record[THETA] = theta;
    record[MEAN] = mean;
    record[INVERSE] = inverse;
    record[LENGTH] = length;
    record[U_X] = u_x;
    record[U_Y] = (wv_n + sum[VB]) / length;
    record[DISTANCE] = s - u_x;
    record[MEAN_U] = p.layer_norm ? sum[WV] / length / d : 0;
    record[ALONG_U] = wv_n / length / d;
    record[SUM_INTO] = sum[M] / length;
    record[SUM_INTO_N] = n_m / length;
    const double slope = sum[WVM] / (length * length) - double(record[MEAN_U]) * record[SUM_INTO] -
                         double(record[ALONG_U]) * record[SUM_INTO_N];
    record[SLOPE] = slope * inverse;
    if (!(outcome & FAILED) && !(fabs(1 - a * record[SLOPE]) * MAX_GAIN >= 1)) outcome |= GRAD_LIMITED;
    return outcome;
}

// The small row `i` of a row: the gate, B or C.
DEVICE int small_column(const Cell &p, int i) {
    return i == 0 ? p.gates : i <= STATES ? p.B + i - 1 : p.C + i - 1 - STATES;
}

// Normalize B and C of a sequence in place, and write BC and the lengths into its record. A warp.
DEVICE void normalize_B_and_C(const Cell &p, Member &me, int s) {
    float *entry_place = me.memory->small[s] + 1 + me.lane;  // the first 16 lanes have B, the others C
    const float entry = *entry_place;
    float squares = entry * entry;
    for (int mask = 1; mask < STATES; mask *= 2) squares += from_lane(squares, mask);
    const float length = p.bc_norm ? limit_length(sqrtf(squares), p.eps) : 1;
    const float unit = entry / length;
    float product = unit * from_lane(unit, STATES);
    for (int mask = 1; mask < STATES; mask *= 2) product += from_lane(product, mask);
    *entry_place = unit;
    if (me.lane == 0) me.memory->record[s][BC] = product;
    if (me.lane % STATES == 0) me.memory->record[s][me.lane ? C_LENGTH : B_LENGTH] = length;
}

// The state of a team, and the vectors of the current token, of the items of a lane.
struct ForwardItems {
    float h[ITEMS][4];
    float f[ITEMS], m[ITEMS], v[ITEMS];
};

// Copy the rows of W_y for the channels of this block and its small rows into shared memory.
DEVICE void load_weight_rows(const Cell &p, const Member &me) {
    for (int i = thread_in_block(); i < (CHANNELS + SMALL_ROWS_OF_BLOCK) * D_INNER; i += CREWS * CREW_THREADS) {
        const int row = i / D_INNER, c = i % D_INNER;
        const int small_row = me.block * SMALL_ROWS_OF_BLOCK + row - CHANNELS;
        const bool is_missing = row >= CHANNELS && small_row >= SMALL_ROWS;
        const int64_t column = row < CHANNELS ? p.vectors + me.block * CHANNELS + row
                                              : is_missing ? 0 : small_column(p, small_row);
        me.weight[row * WEIGHT_STRIDE + c] = is_missing ? uint16_t(0) : p.weight[column * D_INNER + c];
    }
}

DEVICE void load_state(const Cell &p, const Member &me, float (&h)[ITEMS][4]) {
    for (int item = 0; item < ITEMS; ++item)
        for (int j = 0; j < 4; ++j)
            h[item][j] = p.h0 && me.sequence_of(item) < me.sequences ? p.h0[me.state_entry(item, j)] : 0;
}
DEVICE void store_state(const Member &me, const float (&h)[ITEMS][4], float *to) {
    for (int item = 0; item < ITEMS; ++item)
        for (int j = 0; j < 4; ++j)
            if (me.sequence_of(item) < me.sequences) to[me.state_entry(item, j)] = h[item][j];
}

// 1. Let the state decay, and prefetch the token's other inputs.
DEVICE void begin_token(const Cell &p, const Member &me, int t, ForwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item);
        if (s >= me.sequences) break;
        const uint32_t token = me.token(p, s, t);
        const float keep = p.keep ? p.keep[token] : 1, dt = p.dt[token * D_INNER + c];
        prefetch(p.x + token * D_INNER + c);
        prefetch(p.raw + token * uint32_t(p.columns) + p.vectors + c);
        if (p.gate) prefetch(p.gate + token * D_INNER + c);
        const float *rates = me.rates + me.local_channel_of(item) * STATES + 4 * me.quarter;
        for (int j = 0; j < 4; ++j) items.h[item][j] *= keep * exp2_of(dt * rates[j]);
    }
}

// 2. Complete the small rows of this block (raw + W_y y) and send them.
DEVICE void send_small_rows(const Cell &p, const Member &me, int t, uint32_t step) {
    constexpr int rows = SMALL_ROWS_OF_BLOCK, words = SMALL_ROW_WORDS;
    for (int i = me.thread; i < words; i += CREW_THREADS) {
        Word word = {{0, 0, 0}, step};
        for (int k = 0; k < 3; ++k) {
            const int s = (3 * i + k) / rows, row = (3 * i + k) % rows, small_row = me.block * rows + row;
            if (s >= me.sequences || small_row >= SMALL_ROWS) continue;
            const uint32_t token = me.token(p, s, t);
            const int column = small_column(p, small_row);
            const float keep = p.keep ? p.keep[token] : 1;
            const float entry = from_bf16(p.raw[token * uint32_t(p.columns) + column]) + keep * me.sum_parts(row, s, 0, 1);
            word.value[k] = float_to_bits(round_to_bf16(entry));
            if (p.rows) p.rows[token * uint32_t(p.columns) + column] = to_bf16(entry);
        }
        store_word(me.mail.small_rows + me.block * words + i, word);
    }
}

// 3. Receive the small rows of all blocks into memory->small.
DEVICE void receive_small_rows(Member &me, uint32_t step) {
    constexpr int rows = SMALL_ROWS_OF_BLOCK, words = SMALL_ROW_WORDS;
    for (int i = me.thread; i < BLOCKS * words; i += CREW_THREADS) {
        const int source = i / words;
        const Word *place = me.mail.small_rows + i;
        const Word word = await_word(place, step, load_word(place), me.alarm, me.is_late);
        for (int k = 0; k < 3; ++k) {
            const int entry = 3 * (i % words) + k, s = entry / rows, small_row = source * rows + entry % rows;
            if (s < me.sequences && small_row < SMALL_ROWS)
                me.memory->small[s][small_row] = bits_to_float(word.value[k]);
        }
    }
}

// 4. Compute v, f and m of a token, and write their sums over the channels of each unit.
DEVICE void compute_forward_sums(const Cell &p, const Member &me, int t, ForwardItems &items) {
    const int q = me.quarter;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item);
        if (s >= me.sequences) break;
        const uint32_t token = me.token(p, s, t);
        const float keep = p.keep ? p.keep[token] : 1;
        const float *C = me.memory->small[s] + 1 + STATES + 4 * q;
        const float product = sum_quarters(me.sum_parts(me.local_channel_of(item), s, q, 4));
        const float raw = from_bf16(p.raw[token * uint32_t(p.columns) + p.vectors + c]);
        const float entry = round_to_bf16(raw + keep * product);
        if (p.rows && q == 0) p.rows[token * uint32_t(p.columns) + p.vectors + c] = to_bf16(entry);
        const float v = items.v[item] = activate(entry, p.act);
        const float x = p.x[token * D_INNER + c], dt = p.dt[token * D_INNER + c];
        float past = 0;
        for (int j = 0; j < 4; ++j) past += items.h[item][j] * C[j];
        past = sum_quarters(past);
        const float gamma = dt * me.memory->record[s][BC] + (p.D ? p.D[c] : 0);
        const float gate = p.gate ? p.gate[token * D_INNER + c] : 1;
        const float f = items.f[item] = gate * (past + gamma * x), m = items.m[item] = gate * gamma * v;
        const float wv = (p.norm_weight ? p.norm_weight[c] : 1) * v, bias = p.norm_bias ? p.norm_bias[c] : 0;
        // Each of the four lanes of a channel has three of the sums.
        float term[3];
        term[0] = q == 0 ? v * v : q == 1 ? m : q == 2 ? m * m : wv;
        term[1] = q == 0 ? v * x : q == 1 ? f * f : q == 2 ? wv * f : v * bias;
        term[2] = q == 0 ? f : q == 1 ? f * m : q == 2 ? wv * m : 0;
        for (int k = 0; k < 3; ++k) {
            const float sum = sum_channels(term[k]);
            if (me.channel == 0) me.memory->unit_sums[me.unit_of(item)][3 * q + k] = sum;
        }
    }
}

// 5. Solve the equation of every sequence, one thread per sequence.
DEVICE void solve_token(const Cell &p, Member &me, int t) {
    const int s = me.scalar_sequence();
    if (s >= me.sequences) return;
    float root, *record = me.memory->record[s];
    const int outcome = solve_sequence(p, me.memory->totals[s], me.memory->small[s][0], record, root);
    if (me.block) return;
    const uint32_t token = me.token(p, s, t);
    p.outcome[token] = uint8_t(outcome);
    if (p.records)
        for (int i = 0; i < RECORD_SIZE; ++i) p.records[token * RECORD_SIZE + i] = record[i];
}

// 6. Compute y, for the next token and for the caller.
DEVICE void compute_y(const Cell &p, const Member &me, int t, const ForwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item);
        if (s >= me.sequences) break;
        const float *record = me.memory->record[s];
        const float normed = (items.f[item] + record[THETA] * items.m[item] - record[MEAN]) * record[INVERSE];
        const float y = normed * (p.norm_weight ? p.norm_weight[c] : 1) + (p.norm_bias ? p.norm_bias[c] : 0);
        if (me.quarter) continue;
        me.memory->vector[s][me.local_channel_of(item)] = to_bf16(y);
        p.y[me.token(p, s, t) * D_INNER + c] = y;
    }
}

// 6. Add the token to the state.
DEVICE void add_token(const Cell &p, const Member &me, int t, ForwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item);
        if (s >= me.sequences) break;
        const float *B = me.memory->small[s] + 1 + 4 * me.quarter;
        const uint32_t entry = me.token(p, s, t) * D_INNER + me.channel_of(item);
        const float inflow = p.dt[entry] * (p.x[entry] + me.memory->record[s][THETA] * items.v[item]);
        for (int j = 0; j < 4; ++j) items.h[item][j] += inflow * B[j];
    }
}

// After a wait that took too long: the tokens from `t` on become NaN, so that nobody uses them.
DEVICE void abandon(const Cell &p, const Member &me, int t, float *results) {
    for (int item = 0; item < ITEMS; ++item)
        for (int64_t i = t; i < p.length && me.sequence_of(item) < me.sequences; ++i)
            results[(int64_t(me.first + me.sequence_of(item)) * p.length + i) * D_INNER + me.channel_of(item)] =
                bits_to_float(NAN_BITS);
}

DEVICE void abandon_forward(const Cell &p, const Member &me, int t) {
    abandon(p, me, t, p.y);
    float h[ITEMS][4];
    for (int item = 0; item < ITEMS; ++item)
        for (int j = 0; j < 4; ++j) h[item][j] = bits_to_float(NAN_BITS);
    store_state(me, h, p.state);
}

DEVICE void run_forward(const Cell &p) {
    Member me(p, FORWARD_WEIGHT_BYTES);
    load_weight_rows(p, me);
    sync_block();
    if (me.sequences <= 0) return;
    ForwardItems items;
    load_state(p, me, items.h);
    for (int i = me.thread; i < SEQUENCES * CHANNELS; i += CREW_THREADS) {
        const int s = i / CHANNELS, c = i % CHANNELS;
        const bool is_given = p.y0 && s < me.sequences;
        const int64_t entry = int64_t(me.first + s) * D_INNER + me.block * CHANNELS + c;
        me.memory->vector[s][c] = is_given ? to_bf16(p.y0[entry]) : uint16_t(0);
    }
    me.sync();
    me.send_vector(1);
    for (int t = 0; t < p.length; ++t) {
        const uint32_t step = t + 1;
        if (p.checkpoints && t % p.chunk == 0) {
            const int64_t chunks = (p.length + p.chunk - 1) / p.chunk;
            for (int item = 0; item < ITEMS; ++item)
                for (int j = 0; j < 4; ++j) {
                    const int64_t s = me.first + me.sequence_of(item);
                    const int64_t row = (s * chunks + t / p.chunk) * STATES + 4 * me.quarter + j;
                    if (me.sequence_of(item) < me.sequences)
                        p.checkpoints[row * D_INNER + me.channel_of(item)] = items.h[item][j];
                }
        }
        begin_token(p, me, t, items);
        Word words[SOURCES][VECTOR_WORDS];
        me.receive_vectors(step, words);
        me.multiply_rows(words, CHANNELS, SMALL_ROWS_OF_BLOCK, 0);
        me.sync();
        send_small_rows(p, me, t, step);
        me.sync();
#pragma unroll
        for (int row = 0; row < CHANNELS; row += 16) me.multiply_rows(words, row, 16, row);
        receive_small_rows(me, step);
        me.sync();
        for (int s = me.warp; s < me.sequences; s += WARPS) {
            normalize_B_and_C(p, me, s);
            if (p.units && me.block == 0) {
                const uint32_t token = me.token(p, s, t);
                p.units[token * 2 * STATES + me.lane] = me.memory->small[s][1 + me.lane];
            }
        }
        me.sync();
        compute_forward_sums(p, me, t, items);
        me.sync();
        me.send_sums<WORDS_OF_SUMS>(me.mail.sums, step);
        me.receive_sums<WORDS_OF_SUMS>(me.mail.sums, step, me.memory->totals);
        me.sync();
        solve_token(p, me, t);
        if (me.is_anyone_late()) return abandon_forward(p, me, t);
        compute_y(p, me, t, items);
        me.sync();
        me.send_vector(step + 1);
        add_token(p, me, t, items);
    }
    store_state(me, items.h, p.state);
}
