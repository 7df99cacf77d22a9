// Forward pass of the exact solve, all tokens in one launch: FP-Mamba-1 with up to four reflections.
//
// lm/kernels/cell_arguments.py has the equations, team.h describes how blocks work together. A token:
//
//   1. The state decays.
//   2. y of the previous token arrives (mail.vectors). The rows of W_y for the gates, B and C are the
//      small rows, because they are few; each block has a share of them. The block first multiplies
//      y with its small rows and sends the products, then multiplies y with the rows of its channels.
//   3. The products of the small rows of all blocks arrive (mail.small_rows), added to raw.
//   4. Sums over channels are exchanged (mail.sums), eleven for one reflection.
//   5. Every block solves the equation of every sequence of its team. All get the same bits.
//   6. y of the token is sent, and the token is added to the state.
//
// Each kind of mail has one buffer, because no block overwrites a word that another one has not read.
// A block overwrites y_{t−1} by y_t only after it has all sums of token t, and a block that has sent
// those sums has read all of y_{t−1}. It overwrites the sums of t − 1 only after it has all of y_{t−1},
// and a block that has sent y_{t−1} has read all sums of t − 1. The same holds for the small rows.

#pragma once

#include "token_equation.h"

// Return the column of raw (the row of W_y) that small row i computes: a gate's, one of B or one of C.
DEVICE int small_column(const Cell &cell, int i) {
    const int state = i - REFLECTIONS;
    return i < REFLECTIONS ? cell.gates + i : state < STATES ? cell.B + state : cell.C + state - STATES;
}

// Normalize B and C of sequence s in place, and write BC and the lengths into its record. All lanes of
// one warp call this together.
DEVICE void normalize_B_and_C(const Cell &cell, Member &me, int s) {
    float *entry_place = me.memory->small[s] + REFLECTIONS + me.lane;  // the first 16 lanes have B, the others C
    const float entry = *entry_place;
    float squares = entry * entry;
    for (int mask = 1; mask < STATES; mask *= 2) squares += shuffle_xor(squares, mask);
    const float length = cell.bc_norm ? at_least(sqrtf(squares), cell.eps) : 1;
    const float normalized = entry / length;
    float product = normalized * shuffle_xor(normalized, STATES);
    for (int mask = 1; mask < STATES; mask *= 2) product += shuffle_xor(product, mask);
    *entry_place = normalized;
    if (me.lane == 0) me.memory->record[s][BC] = product;
    if (me.lane % STATES == 0) me.memory->record[s][me.lane ? C_LENGTH : B_LENGTH] = length;
}

// Return the index in (b,l,K) of channel c of a token's i-th vector.
DEVICE uint32_t vector_entry(const Cell &cell, uint32_t token, int i, int c) {
    return token * uint32_t(cell.columns) + cell.vectors + i * D_INNER + c;
}

// Values of a lane, for each item of its warp (an item is a unit of eight channels: see team.h).
struct ForwardItems {
    float h[ITEMS][4];  // the lane's four states
    float f[ITEMS], m[ITEMS][REFLECTIONS], v[ITEMS][REFLECTIONS];  // of the current token
};

// Copy the rows of W_y for the channels of this block and its small rows into shared memory. The last
// block's small rows are filled up with zeros.
DEVICE void load_weight_rows(const Cell &cell, const Member &me) {
    for (int i = thread_in_block(); i < FORWARD_ROWS * D_INNER; i += CREWS * CREW_THREADS) {
        const int row = i / D_INNER, c = i % D_INNER, vector = row / CHANNELS;
        const int small_row = me.block * SMALL_ROWS_PER_BLOCK + row - REFLECTIONS * CHANNELS;
        const bool is_padding = vector >= REFLECTIONS && small_row >= SMALL_ROWS;
        const int64_t column = vector < REFLECTIONS
                                   ? cell.vectors + vector * D_INNER + me.block * CHANNELS + row % CHANNELS
                                   : is_padding ? 0 : small_column(cell, small_row);
        me.weight[row * row_stride(Y_ENTRIES) + c] = is_padding ? uint16_t(0) : cell.weight[column * D_INNER + c];
    }
}

DEVICE void load_state(const Cell &cell, const Member &me, float (&h)[ITEMS][4]) {
    for (int item = 0; item < ITEMS; ++item)
        for (int j = 0; j < 4; ++j)
            h[item][j] = cell.h0 && me.sequence_of(item) < me.sequences ? cell.h0[me.state_entry(item, j)] : 0;
}
DEVICE void store_state(const Member &me, const float (&h)[ITEMS][4], float *to) {
    for (int item = 0; item < ITEMS; ++item)
        for (int j = 0; j < 4; ++j)
            if (me.sequence_of(item) < me.sequences) to[me.state_entry(item, j)] = h[item][j];
}

// 1. Let the state decay, and prefetch the token's other inputs.
DEVICE void begin_token(const Cell &cell, const Member &me, int t, ForwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item);
        if (s >= me.sequences) break;
        const uint32_t token = me.token_index(cell, s, t);
        const float keep = cell.keep ? cell.keep[token] : 1, dt = cell.dt[token * D_INNER + c];
        prefetch(cell.x + token * D_INNER + c);
        for (int i = 0; i < REFLECTIONS; ++i) prefetch(cell.raw + vector_entry(cell, token, i, c));
        if (cell.gate) prefetch(cell.gate + token * D_INNER + c);
        const float *rates = me.rates + me.local_channel_of(item) * STATES + 4 * me.quarter;
        for (int j = 0; j < 4; ++j) items.h[item][j] *= keep * exp2_of(dt * rates[j]);
    }
}

// 2. Complete the small rows of this block (raw + W_y y) and send them.
DEVICE void send_small_rows(const Cell &cell, const Member &me, int t, uint32_t step) {
    constexpr int rows = SMALL_ROWS_PER_BLOCK, words = SMALL_ROW_WORDS;
    for (int i = me.thread; i < words; i += CREW_THREADS) {
        Word word = {{0, 0, 0}, step};
        for (int k = 0; k < 3; ++k) {
            const int s = (3 * i + k) / rows, row = (3 * i + k) % rows, small_row = me.block * rows + row;
            if (s >= me.sequences || small_row >= SMALL_ROWS) continue;
            const uint32_t token = me.token_index(cell, s, t);
            const int column = small_column(cell, small_row);
            const float keep = cell.keep ? cell.keep[token] : 1;
            const float raw = from_bf16(cell.raw[token * uint32_t(cell.columns) + column]);
            const float entry = raw + keep * me.sum_parts(row, s, 0, 1);  // the parts of all warps
            word.value[k] = float_to_bits(round_to_bf16(entry));
            if (cell.rows) cell.rows[token * uint32_t(cell.columns) + column] = to_bf16(entry);
        }
        store_word(me.mail.small_rows + me.block * words + i, word);
    }
}

// 3. Receive the small rows of all blocks into memory->small.
DEVICE void receive_small_rows(Member &me, uint32_t step) {
    constexpr int rows = SMALL_ROWS_PER_BLOCK, words = SMALL_ROW_WORDS;
    for (int i = me.thread; i < BLOCKS * words; i += CREW_THREADS) {
        const int source = i / words;
        const Word *place = me.mail.small_rows + i;
        const Word word = await_word(place, step, load_word(place), me.alarm, me.has_timed_out);
        for (int k = 0; k < 3; ++k) {
            const int entry = 3 * (i % words) + k, s = entry / rows, small_row = source * rows + entry % rows;
            if (s < me.sequences && small_row < SMALL_ROWS)
                me.memory->small[s][small_row] = bits_to_float(word.value[k]);
        }
    }
}

// 4. Compute v, f and m of a token, and write their sums over the eight channels of each unit.
DEVICE void compute_forward_sums(const Cell &cell, const Member &me, int t, ForwardItems &items) {
    const int q = me.quarter;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item);
        if (s >= me.sequences) break;
        const uint32_t token = me.token_index(cell, s, t);
        const float keep = cell.keep ? cell.keep[token] : 1;
        const float *C = me.memory->small[s] + REFLECTIONS + STATES + 4 * q;
        float (&v)[REFLECTIONS] = items.v[item], (&m)[REFLECTIONS] = items.m[item];
        for (int i = 0; i < REFLECTIONS; ++i) {
            const int row = i * CHANNELS + me.local_channel_of(item);
            const float product = sum_quarters(me.sum_parts(row, s, q, 4));  // a quarter of the warps
            const float raw = from_bf16(cell.raw[vector_entry(cell, token, i, c)]);
            const float entry = round_to_bf16(raw + keep * product);
            if (cell.rows && q == 0) cell.rows[vector_entry(cell, token, i, c)] = to_bf16(entry);
            v[i] = activate(entry, cell.act);
        }
        const float x = cell.x[token * D_INNER + c], dt = cell.dt[token * D_INNER + c];
        float past = 0;
        for (int j = 0; j < 4; ++j) past += items.h[item][j] * C[j];
        past = sum_quarters(past);
        const float gamma = dt * me.memory->record[s][BC] + (cell.D ? cell.D[c] : 0);
        const float gate = cell.gate ? cell.gate[token * D_INNER + c] : 1;
        const float f = items.f[item] = gate * (past + gamma * x), weight = cell.norm_weight ? cell.norm_weight[c] : 1;
        const float bias = cell.norm_bias ? cell.norm_bias[c] : 0;
        float term[FORWARD_SUMS];
        term[F] = f;
        term[FF] = f * f;
        for (int i = 0; i < REFLECTIONS; ++i) {
            const float wv = weight * v[i];
            m[i] = gate * gamma * v[i];
            term[VX + i] = v[i] * x;
            term[M + i] = m[i];
            term[FM + i] = f * m[i];
            term[WVF + i] = wv * f;
            term[WV + i] = wv;
            term[VB + i] = v[i] * bias;
            for (int j = 0; j <= i; ++j) {
                const int pair = pair_index(i, j);
                term[VV + pair] = v[i] * v[j];
                term[MM + pair] = m[i] * m[j];
                term[WVM + pair] = wv * m[j];
            }
        }
        sum_terms(term, q, me.channel, me.memory->unit_sums[me.unit_of(item)]);
    }
}

// 5. Solve the equation of every sequence, one thread per sequence.
DEVICE void solve_token(const Cell &cell, Member &me, int t) {
    const int s = me.find_solver_sequence();
    if (s >= me.sequences) return;
    float *record = me.memory->record[s];
    const int outcome = solve_sequence(cell, me.memory->totals[s], me.memory->small[s], record);
    if (me.block) return;  // all blocks have the same results: block 0 stores them
    const uint32_t token = me.token_index(cell, s, t);
    cell.outcome[token] = uint8_t(outcome);
    if (cell.records)
        for (int i = 0; i < RECORD_SIZE; ++i) cell.records[token * RECORD_SIZE + i] = record[i];
}

// 6. Compute y, for the next token and for the caller.
DEVICE void compute_y(const Cell &cell, const Member &me, int t, const ForwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item);
        if (s >= me.sequences) break;
        const float *record = me.memory->record[s];
        const float output = add_reflections(items.f[item], record + THETA, items.m[item]);
        const float normed = (output - record[MEAN]) * record[INVERSE];
        const float y = normed * (cell.norm_weight ? cell.norm_weight[c] : 1) + (cell.norm_bias ? cell.norm_bias[c] : 0);
        if (me.quarter) continue;
        me.memory->vector[s][me.local_channel_of(item)] = to_bf16(y);
        cell.y[me.token_index(cell, s, t) * D_INNER + c] = y;
    }
}

// 6. Add the token to the state.
DEVICE void add_token(const Cell &cell, const Member &me, int t, ForwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item);
        if (s >= me.sequences) break;
        const float *B = me.memory->small[s] + REFLECTIONS + 4 * me.quarter;
        const uint32_t entry = me.token_index(cell, s, t) * D_INNER + me.channel_of(item);
        const float *theta = me.memory->record[s] + THETA;
        const float inflow = cell.dt[entry] * add_reflections(cell.x[entry], theta, items.v[item]);
        for (int j = 0; j < 4; ++j) items.h[item][j] += inflow * B[j];
    }
}

// After a wait that took too long: make the `results` (b,l,d) of the tokens from t on NaN, so that
// nobody uses them.
DEVICE void abandon(const Cell &cell, const Member &me, int t, float *results) {
    for (int item = 0; item < ITEMS; ++item)
        for (int64_t i = t; i < cell.length && me.sequence_of(item) < me.sequences; ++i) {
            const int64_t token = int64_t(me.first_sequence + me.sequence_of(item)) * cell.length + i;
            results[token * D_INNER + me.channel_of(item)] = bits_to_float(NAN_BITS);
        }
}

// Make y from token t on and the final state NaN in this block. Other blocks may already have stored
// finite values of token t; in them only later tokens become NaN.
DEVICE void abandon_forward(const Cell &cell, const Member &me, int t) {
    abandon(cell, me, t, cell.y);
    float h[ITEMS][4];
    for (int item = 0; item < ITEMS; ++item)
        for (int j = 0; j < 4; ++j) h[item][j] = bits_to_float(NAN_BITS);
    store_state(me, h, cell.state);
}

DEVICE void store_checkpoint(const Cell &cell, const Member &me, int t, const ForwardItems &items) {
    const int64_t chunks = (cell.length + cell.chunk - 1) / cell.chunk;
    for (int item = 0; item < ITEMS; ++item)
        for (int j = 0; j < 4; ++j) {
            const int64_t s = me.first_sequence + me.sequence_of(item);
            const int64_t row = (s * chunks + t / cell.chunk) * STATES + 4 * me.quarter + j;
            if (me.sequence_of(item) < me.sequences)
                cell.checkpoints[row * D_INNER + me.channel_of(item)] = items.h[item][j];
        }
}

DEVICE void run_forward(const Cell &cell) {
    Member me(cell, FORWARD_WEIGHT_BYTES);
    load_weight_rows(cell, me);
    sync_block();
    if (me.sequences <= 0) return;
    ForwardItems items;
    load_state(cell, me, items.h);
    for (int i = me.thread; i < SEQUENCES * CHANNELS; i += CREW_THREADS) {
        const int s = i / CHANNELS, c = i % CHANNELS;
        const bool has_y0 = cell.y0 && s < me.sequences;
        const int64_t entry = int64_t(me.first_sequence + s) * D_INNER + me.block * CHANNELS + c;
        me.memory->vector[s][c] = has_y0 ? to_bf16(cell.y0[entry]) : uint16_t(0);
    }
    me.sync();
    me.send_vector<Y_ENTRIES>(1);
    for (int t = 0; t < cell.length; ++t) {
        const uint32_t step = t + 1;
        if (cell.checkpoints && t % int(cell.chunk) == 0) store_checkpoint(cell, me, t, items);
        begin_token(cell, me, t, items);
        Word words[SOURCES][count_vector_words(Y_ENTRIES)];
        me.receive_vectors(step, words);
        // The small rows follow the rows of the channels in shared memory; their products begin at 0.
        me.multiply_rows<Y_ENTRIES>(words, REFLECTIONS * CHANNELS, SMALL_ROWS_PER_BLOCK, 0);
        me.sync();
        send_small_rows(cell, me, t, step);
        me.sync();
#pragma unroll
        for (int row = 0; row < REFLECTIONS * CHANNELS; row += MMA_ROWS)
            me.multiply_rows<Y_ENTRIES>(words, row, MMA_ROWS, row);
        receive_small_rows(me, step);
        me.sync();
        for (int s = me.warp; s < me.sequences; s += WARPS) {
            normalize_B_and_C(cell, me, s);
            if (cell.units && me.block == 0) {  // B and C as unit vectors, for the backward pass
                const uint32_t token = me.token_index(cell, s, t);
                cell.units[token * 2 * STATES + me.lane] = me.memory->small[s][REFLECTIONS + me.lane];
            }
        }
        me.sync();
        compute_forward_sums(cell, me, t, items);
        me.sync();
        me.send_sums<FORWARD_SUM_WORDS>(me.mail.sums, step);
        me.receive_sums<FORWARD_SUM_WORDS>(me.mail.sums, step, 0);
        me.sync();
        solve_token(cell, me, t);
        if (me.has_any_timed_out()) return abandon_forward(cell, me, t);
        compute_y(cell, me, t, items);
        me.sync();
        me.send_vector<Y_ENTRIES>(step + 1);
        add_token(cell, me, t, items);
    }
    store_state(me, items.h, cell.state);
}
