// Backward pass of the exact solve, all tokens in one launch, the last token first.
//
// lm/kernels/cpu/cell_gradient.h derives the gradient of a token. Each block has in shared memory the
// columns of W_y of its channels, so that it can compute its part of W_yᵀ d_row. A token:
//
//   1. At the last token of a chunk, the states of the chunk are recomputed from its checkpoint into
//      cell.H. The token's vectors are recomputed from its record.
//   2. λ = ∂y + keep W_yᵀ d_row: ∂y is the gradient of the output y, d_row and keep are the next token's.
//   3. Sums over channels are exchanged (mail.sums): those with λ, and the gradient of B.
//   4. Every block computes η, the gradient of the root; then its part of d_row, which is sent
//      (mail.vectors) with the gradient of C and of B·C (mail.late_sums).
//   5. The gradients of the token's inputs and of the state before it.
//   6. The row's gradient and the late sums of all blocks arrive. The block multiplies them with its
//      columns of W_y.
//
// Each kind of mail has one buffer, for the same reason as in cell_forward.h: a block sends sums
// of a token only after it has read all vectors and late sums of the next one, and it sends vectors
// and late sums only after it has read all sums of this token.

#pragma once

#include "cell_forward.h"

// Sums over channels of one sequence, in the order of the words that carry them. The terms: L w λ, LN w λ n,
// LM w λ m, V_STATE v dt (μ B), LL λ², with w, n and m as for Record, μ the gradient of the state after the
// token; LM and V_STATE for each reflection. D_B: gradient of B, STATES entries.
enum BackwardSum { L, LN, LM, V_STATE = LM + REFLECTIONS, LL = V_STATE + REFLECTIONS, D_B };
enum LateSum { D_BC = 0, D_C = 1 };  // gradients of B·C, and of C, STATES entries
static_assert(D_B + STATES == BACKWARD_SUMS && D_C + STATES == LATE_SUMS);

// Numbers of a sequence's token that all its channels read, those from ETA to D_GATE_ENTRY for each
// reflection. λ + Σ η u is the gradient of y with s constant.
enum Scalar {
    MEAN_LAMBDA,                             // mean of w (λ + Σ η u); 0 for RMSNorm
    ALONG_LAMBDA,                            // mean of w (λ + Σ η u) n
    ETA,
    MIX_WEIGHT = ETA + REFLECTIONS,          // T (s − U x), in x̃ = x + Σ MIX_WEIGHT · u
    D_UX = MIX_WEIGHT + REFLECTIONS,         // gradient of u·x
    DOTS = D_UX + REFLECTIONS,               // u · (gradient of u); 0 if v is shorter than eps: u has no fixed length
    D_GATE_ENTRY = DOTS + REFLECTIONS,       // gradient of the row's gate
    D_GRAM = D_GATE_ENTRY + REFLECTIONS      // gradient of u_i·u_j, by pair_index
};
static_assert(D_GRAM + PAIRS == SCALARS);

// Values of a lane, for each item of its warp. Those without a comment are of the current token.
struct BackwardItems {
    float mu[ITEMS][4];    // gradients of the lane's four states
    float carried[ITEMS];  // keep W_yᵀ d_row of the next token
    float ungated[ITEMS], normed[ITEMS], mu_B[ITEMS], lambda[ITEMS];
    float dD[ITEMS], d_weight[ITEMS], d_bias[ITEMS], dA[ITEMS][4];  // sums over tokens
};

// Copy the columns of W_y for this block's channels: transposed for the vectors' rows, into me.weight, in
// the order in which blocks send the gradients; as they are for the small rows, into small_weight.
DEVICE void load_weight_columns(const Cell &cell, const Member &me, uint16_t *small_weight) {
    for (int i = thread_in_block(); i < REFLECTIONS * D_INNER * CHANNELS; i += CREWS * CREW_THREADS) {
        const int row = i / CHANNELS, c = i % CHANNELS, vector = row / D_INNER, source = row % D_INNER / CHANNELS;
        const int place = source * D_ROW_ENTRIES + vector * CHANNELS + row % CHANNELS;
        me.weight[c * row_stride(D_ROW_ENTRIES) + place] =
            cell.weight[(cell.vectors + row) * D_INNER + me.block * CHANNELS + c];
    }
    for (int i = thread_in_block(); i < SMALL_ROWS * CHANNELS; i += CREWS * CREW_THREADS)
        small_weight[i] = cell.weight[int64_t(small_column(cell, i / CHANNELS)) * D_INNER +
                                   me.block * CHANNELS + i % CHANNELS];
}

// Load the vectors of a channel from the rows, before their activation (`entry`) and after it (`v`).
DEVICE void load_vectors(const Cell &cell, uint32_t token, int c, float (&entry)[REFLECTIONS], float (&v)[REFLECTIONS]) {
    for (int i = 0; i < REFLECTIONS; ++i) {
        entry[i] = from_bf16(cell.rows[vector_entry(cell, token, i, c)]);
        v[i] = activate(entry[i], cell.act);
    }
}

// Return this lane's four states of an item in cell.H.
DEVICE Quad *find_state(const Cell &cell, const Member &me, int token_in_chunk, int item) {
    const int64_t worker = int64_t(block_index()) * CREWS + me.crew;
    const int64_t place = (worker * cell.chunk + token_in_chunk) * ITEMS + item;
    return reinterpret_cast<Quad *>(cell.H) + place * CREW_THREADS + me.thread;
}

// 1. Recompute the states of the chunk of tokens first … last, after their decay. Blocks exchange nothing.
DEVICE void recompute_states(const Cell &cell, const Member &me, int first, int last) {
    const int64_t chunks = (cell.length + cell.chunk - 1) / cell.chunk;
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item);
        if (s >= me.sequences) break;
        float h[4];
        const int64_t row = ((me.first_sequence + s) * chunks + first / cell.chunk) * STATES + 4 * me.quarter;
        for (int j = 0; j < 4; ++j) h[j] = cell.checkpoints[(row + j) * D_INNER + c];
        const float *rates = me.rates + me.local_channel_of(item) * STATES + 4 * me.quarter;
        for (int t = first; t <= last; ++t) {
            const uint32_t token = me.token_index(cell, s, t);
            const float keep = cell.keep ? cell.keep[token] : 1, dt = cell.dt[token * D_INNER + c];
            const float *theta = cell.records + token * RECORD_SIZE + THETA;
            float entry[REFLECTIONS], v[REFLECTIONS];
            load_vectors(cell, token, c, entry, v);
            const float mixed = add_reflections(cell.x[token * D_INNER + c], theta, v);
            const float *B = cell.units + token * 2 * STATES + 4 * me.quarter;
            Quad H;
            for (int j = 0; j < 4; ++j) {
                H.value[j] = h[j] *= keep * exp2_of(dt * rates[j]);
                h[j] += dt * mixed * B[j];
            }
            *find_state(cell, me, t - first, item) = H;
        }
    }
}

// 1. Load the record, and B and C after their normalization, of a token of every sequence.
DEVICE void load_record(const Cell &cell, Member &me, int t) {
    for (int i = me.thread; i < me.sequences * (RECORD_SIZE + 2 * STATES); i += CREW_THREADS) {
        const int s = i / (RECORD_SIZE + 2 * STATES), entry = i % (RECORD_SIZE + 2 * STATES);
        const uint32_t token = me.token_index(cell, s, t);
        if (entry < RECORD_SIZE)
            me.memory->record[s][entry] = cell.records[token * RECORD_SIZE + entry];
        else
            me.memory->small[s][REFLECTIONS + entry - RECORD_SIZE] = cell.units[token * 2 * STATES + entry - RECORD_SIZE];
    }
}

// 1. to 3. Recompute the vectors of a token, and write the sums of its units.
DEVICE void compute_backward_sums(const Cell &cell, const Member &me, int t, int first,
                                  BackwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item), q = me.quarter;
        if (s >= me.sequences) break;
        const uint32_t token = me.token_index(cell, s, t);
        const float *record = me.memory->record[s];
        const float *B = me.memory->small[s] + REFLECTIONS + 4 * q, *C = B + STATES;
        const Quad H = *find_state(cell, me, t - first, item);
        const float x = cell.x[token * D_INNER + c], dt = cell.dt[token * D_INNER + c];
        float entry[REFLECTIONS], v[REFLECTIONS];
        load_vectors(cell, token, c, entry, v);
        const float gamma = dt * record[BC] + (cell.D ? cell.D[c] : 0);
        const float gate = cell.gate ? cell.gate[token * D_INNER + c] : 1;
        float past = 0, mu_B = 0;
        for (int j = 0; j < 4; ++j) {
            past += H.value[j] * C[j];
            mu_B += items.mu[item][j] * B[j];
        }
        past = sum_quarters(past);
        mu_B = items.mu_B[item] = sum_quarters(mu_B);
        const float mixed = add_reflections(x, record + THETA, v);
        const float ungated = items.ungated[item] = past + gamma * mixed;
        const float normed = items.normed[item] = (gate * ungated - record[MEAN]) * record[INVERSE];
        const float lambda = items.lambda[item] = cell.grad_y[token * D_INNER + c] + items.carried[item];
        const float weighted = lambda * (cell.norm_weight ? cell.norm_weight[c] : 1);
        float *sums = me.memory->unit_sums[me.unit_of(item)];
        float term[D_B];
        term[L] = weighted;
        term[LN] = weighted * normed;
        term[LL] = lambda * lambda;
        for (int i = 0; i < REFLECTIONS; ++i) {
            term[LM + i] = weighted * gate * gamma * v[i];
            term[V_STATE + i] = v[i] * dt * mu_B;
        }
        sum_terms(term, q, me.channel, sums);
        float d_B[4];
        for (int j = 0; j < 4; ++j) d_B[j] = items.mu[item][j] * dt * mixed;
        const float total = sum_four_over_channels(d_B, me.channel);
        if (me.channel < 4) sums[D_B + 4 * q + me.channel] = total;
    }
}

// Compute η and the other scalars of a sequence's token. `gate_entries` are those of its row.
DEVICE void solve_adjoint_of_sequence(const Cell &cell, const double *sum, const uint16_t *gate_entries,
                                      bool has_failed, const float *record, float *scalar) {
    constexpr int R = REFLECTIONS;
    const double d = D_INNER;
    ReflectionMap map;
    MapGradient grads;
    double z[R], distance[R];
    const double mean = cell.layer_norm ? sum[L] / d : 0, along = sum[LN] / d;
    for (int i = 0; i < R; ++i) {
        map.gate[i] = cell.scale / (1 + exp(-double(from_bf16(gate_entries[i]))));
        for (int j = 0; j < i; ++j) map.gram[i][j] = record[GRAM + pair_index(i, j)];
        distance[i] = record[DISTANCE + i];
        // Gradient of u·x̃ through y and through the state, with s as a constant.
        const double length = record[LENGTH + i];
        z[i] = record[INVERSE] * (sum[LM + i] / length - mean * record[SUM_M + i] -
                                  along * record[SUM_NM + i]) +
               sum[V_STATE + i] / length;
    }
    compute_reflection_map<R>(R, cell.sequential, cell.kappa, map);
    backprop_root<R>(R, map, z, grads.d_root);
    compute_recorded_slope(record, map, grads.phi_slope);
    solve_adjoint<R>(R, has_failed, grads);
    for (int i = 0; i < R; ++i) {  // Σ u d_mixed
        grads.d_mix_weights[i] = z[i];
        for (int j = 0; j < R; ++j) grads.d_mix_weights[i] += grads.eta[j] * record[SLOPE + i * R + j];
    }
    backprop_map<R>(R, cell.sequential, cell.kappa, cell.scale, map, distance, grads);
    double mean_lambda = mean, along_lambda = along;
    for (int i = 0; i < R; ++i) {
        const double eta = grads.eta[i], d_Ux = grads.d_Ux[i];
        mean_lambda += eta * record[MEAN_U + i];
        along_lambda += eta * record[ALONG_U + i];
        double mix_weight = 0;
        for (int j = 0; j <= i; ++j) mix_weight += map.map[i][j] * distance[j];
        double dots = mix_weight * grads.d_mix_weights[i] + eta * record[U_Y + i] + d_Ux * record[U_X + i];
        for (int j = 0; j < R; ++j)
            if (j != i) dots += grads.d_gram[i][j] * record[GRAM + pair_index(i, j)];
        const bool is_short = record[LENGTH + i] <= float(cell.eps);
        scalar[ETA + i] = eta;
        scalar[MIX_WEIGHT + i] = mix_weight;
        scalar[D_UX + i] = d_Ux;
        scalar[DOTS + i] = is_short ? 0 : dots;
        scalar[D_GATE_ENTRY + i] = grads.d_gate[i];
        for (int j = 0; j < i; ++j) scalar[D_GRAM + pair_index(i, j)] = grads.d_gram[i][j];
    }
    scalar[MEAN_LAMBDA] = mean_lambda;
    scalar[ALONG_LAMBDA] = along_lambda;
}

// 4. Compute the scalars of every sequence, one thread per sequence.
DEVICE void solve_adjoint_of_token(const Cell &cell, Member &me, int t) {
    const int s = me.find_solver_sequence();
    if (s >= me.sequences) return;
    const uint32_t token = me.token_index(cell, s, t);
    const double *sum = me.memory->totals[s];
    const uint16_t *gate_entries = cell.rows + token * uint32_t(cell.columns) + cell.gates;
    const bool has_failed = cell.outcome[token] & FAILED;
    solve_adjoint_of_sequence(cell, sum, gate_entries, has_failed, me.memory->record[s], me.memory->scalars[s]);
    if (me.block == 0) {
        const float norm = sqrt(float(sum[LL])), previous = cell.largest[me.first_sequence + s];
        if (!(norm <= previous)) cell.largest[me.first_sequence + s] = norm;
    }
}

// 4. and 5. Compute the gradients of a token's inputs, d_row, and the gradient of the state before it.
DEVICE void backprop_token(const Cell &cell, const Member &me, int t, int first, BackwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.channel_of(item), q = me.quarter;
        if (s >= me.sequences) break;
        const uint32_t token = me.token_index(cell, s, t);
        const float *record = me.memory->record[s], *scalar = me.memory->scalars[s];
        const float *B = me.memory->small[s] + REFLECTIONS + 4 * q, *C = B + STATES;
        const float weight = cell.norm_weight ? cell.norm_weight[c] : 1, bias = cell.norm_bias ? cell.norm_bias[c] : 0;
        const float normed = items.normed[item];
        float entry[REFLECTIONS], v[REFLECTIONS], u[REFLECTIONS];
        load_vectors(cell, token, c, entry, v);
        const float x = cell.x[token * D_INNER + c], dt = cell.dt[token * D_INNER + c];
        const float gate = cell.gate ? cell.gate[token * D_INNER + c] : 1;
        const float gamma = dt * record[BC] + (cell.D ? cell.D[c] : 0), mixed = add_reflections(x, record + THETA, v);
        for (int i = 0; i < REFLECTIONS; ++i) u[i] = v[i] / record[LENGTH + i];
        const float lambda = add_reflections(items.lambda[item], scalar + ETA, u);
        const float d_gated = (lambda * weight - scalar[MEAN_LAMBDA] - normed * scalar[ALONG_LAMBDA]) *
                              record[INVERSE];
        const float e = d_gated * gate, d_gamma = e * mixed;
        const float d_mixed = gamma * e + dt * items.mu_B[item];
        const float y = normed * weight + bias;
        float d_entry[REFLECTIONS];
        for (int i = 0; i < REFLECTIONS; ++i) {
            float d_u = scalar[MIX_WEIGHT + i] * d_mixed + scalar[ETA + i] * y + scalar[D_UX + i] * x;
            for (int j = 0; j < REFLECTIONS; ++j)
                if (j != i) d_u += scalar[D_GRAM + pair_index(i, j)] * u[j];
            d_entry[i] = (d_u - u[i] * scalar[DOTS + i]) / record[LENGTH + i] * activate_grad(entry[i], cell.act);
        }
        items.dD[item] += d_gamma;
        items.d_weight[item] += lambda * normed;
        items.d_bias[item] += lambda;
        float *sums = me.memory->unit_sums[me.unit_of(item)];
        const float d_BC = sum_channels(d_gamma * dt);
        if (me.lane == 0) sums[D_BC] = d_BC;
        const Quad H = *find_state(cell, me, t - first, item);
        const float *rates = me.rates + me.local_channel_of(item) * STATES + 4 * q;
        const float keep = cell.keep ? cell.keep[token] : 1;
        float d_C[4], ddt = 0;
        for (int j = 0; j < 4; ++j) {
            d_C[j] = e * H.value[j];
            const float d_H = items.mu[item][j] + e * C[j], d_log = d_H * H.value[j];
            ddt += d_log * rates[j];
            items.dA[item][j] += d_log * dt;
            items.mu[item][j] = d_H * keep * exp2_of(dt * rates[j]);
        }
        const float total = sum_four_over_channels(d_C, me.channel);
        if (me.channel < 4) sums[D_C + 4 * q + me.channel] = total;
        ddt = sum_quarters(ddt) / LOG2_E + d_gamma * record[BC] + mixed * items.mu_B[item];
        if (q) continue;
        for (int i = 0; i < REFLECTIONS; ++i) {
            me.memory->vector[s][i * CHANNELS + me.local_channel_of(item)] = to_bf16(d_entry[i]);
            cell.d_raw[vector_entry(cell, token, i, c)] = to_bf16(d_entry[i]);
        }
        cell.dx[token * D_INNER + c] = add_reflections(d_mixed, scalar + D_UX, u);
        cell.ddt[token * D_INNER + c] = ddt;
        if (cell.d_gate) cell.d_gate[token * D_INNER + c] = d_gated * items.ungated[item];
    }
}

// 6. Backpropagate through the normalization of B and C of sequence s, and write the small rows' gradient.
// All lanes of one warp call this together.
DEVICE void backprop_B_and_C(const Cell &cell, Member &me, int t, int s) {
    const float *record = me.memory->record[s];
    const double *sum = me.memory->totals[s], *late = sum + FIRST_LATE_TOTAL;
    const int state = me.lane % STATES;  // the first 16 lanes have B, the others C
    float *entry_place = me.memory->small[s] + REFLECTIONS + me.lane;  // the normalized entry, then its gradient
    const float normalized = *entry_place, other = shuffle_xor(normalized, STATES);
    const float without_BC = me.lane < STATES ? sum[D_B + state] : late[D_C + state];
    float gradient = without_BC + float(late[D_BC]) * other;
    if (cell.bc_norm) {
        const float length = record[me.lane < STATES ? B_LENGTH : C_LENGTH];
        float dot = gradient * normalized;
        for (int mask = 1; mask < STATES; mask *= 2) dot += shuffle_xor(dot, mask);
        gradient = (gradient - (length <= float(cell.eps) ? 0 : dot * normalized)) / length;
    }
    const uint32_t token = me.token_index(cell, s, t);
    const uint16_t rounded = to_bf16(gradient);
    *entry_place = from_bf16(rounded);
    if (me.block == 0) cell.d_raw[token * uint32_t(cell.columns) + small_column(cell, REFLECTIONS + me.lane)] = rounded;
    if (me.lane >= REFLECTIONS) return;
    const uint16_t d_gate = to_bf16(me.memory->scalars[s][D_GATE_ENTRY + me.lane]);
    me.memory->small[s][me.lane] = from_bf16(d_gate);
    if (me.block == 0) cell.d_raw[token * uint32_t(cell.columns) + cell.gates + me.lane] = d_gate;
}

// 6. Compute the gradient that W_y carries back to y of the previous token.
DEVICE void compute_carried(const Cell &cell, const Member &me, int t, const uint16_t *small_weight,
                            BackwardItems &items) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int s = me.sequence_of(item), c = me.local_channel_of(item);
        if (s >= me.sequences) break;
        float sum = me.sum_parts(c, s, me.quarter, 4);
        for (int i = me.quarter; i < SMALL_ROWS; i += 4)
            sum += me.memory->small[s][i] * from_bf16(small_weight[i * CHANNELS + c]);
        const float keep = cell.keep ? cell.keep[int64_t(me.first_sequence + s) * cell.length + t] : 1;
        items.carried[item] = keep * sum_quarters(sum);
    }
}

DEVICE void store_sums_over_tokens(const Cell &cell, const Member &me, const BackwardItems &items) {
    for (int item = 0; item < ITEMS; ++item) {
        if (me.sequence_of(item) >= me.sequences) break;
        for (int j = 0; j < 4; ++j) cell.dA[me.state_entry(item, j)] = items.dA[item][j];
        if (me.quarter) continue;
        const int64_t entry = int64_t(me.first_sequence + me.sequence_of(item)) * D_INNER + me.channel_of(item);
        if (cell.dD) cell.dD[entry] = items.dD[item];
        if (cell.d_weight) cell.d_weight[entry] = items.d_weight[item];
        if (cell.d_bias) cell.d_bias[entry] = items.d_bias[item];
    }
}

DEVICE void abandon_backward(const Cell &cell, const Member &me, BackwardItems &items) {
    abandon(cell, me, 0, cell.dx);
    abandon(cell, me, 0, cell.ddt);
    if (cell.d_gate) abandon(cell, me, 0, cell.d_gate);
    for (int item = 0; item < ITEMS; ++item) {
        items.dD[item] = items.d_weight[item] = items.d_bias[item] = bits_to_float(NAN_BITS);
        for (int j = 0; j < 4; ++j) items.dA[item][j] = bits_to_float(NAN_BITS);
        if (me.sequence_of(item) >= me.sequences) break;
        for (int t = 0; t < cell.length; ++t) {
            const uint32_t token = me.token_index(cell, me.sequence_of(item), t);
            for (int i = 0; i < REFLECTIONS; ++i)
                cell.d_raw[vector_entry(cell, token, i, me.channel_of(item))] = to_bf16(bits_to_float(NAN_BITS));
        }
    }
    store_sums_over_tokens(cell, me, items);
}

DEVICE void run_backward(const Cell &cell) {
    Member me(cell, BACKWARD_WEIGHT_BYTES);
    uint16_t *small_weight = me.weight + CHANNELS * row_stride(D_ROW_ENTRIES);
    load_weight_columns(cell, me, small_weight);
    sync_block();
    if (me.sequences <= 0) return;
    BackwardItems items = {};
    for (int t = cell.length - 1; t >= 0; --t) {
        const uint32_t step = cell.length - t;
        const int first = t / int(cell.chunk) * int(cell.chunk);
        if (t == cell.length - 1 || t - first == cell.chunk - 1) recompute_states(cell, me, first, t);
        load_record(cell, me, t);
        me.sync();
        compute_backward_sums(cell, me, t, first, items);
        me.sync();
        me.send_sums<BACKWARD_SUM_WORDS>(me.mail.sums, step);
        me.receive_sums<BACKWARD_SUM_WORDS>(me.mail.sums, step, 0);
        me.sync();
        solve_adjoint_of_token(cell, me, t);
        me.sync();
        backprop_token(cell, me, t, first, items);
        me.sync();
        me.send_vector<D_ROW_ENTRIES>(step);
        me.send_sums<LATE_SUM_WORDS>(me.mail.late_sums, step);
        Word words[SOURCES][count_vector_words(D_ROW_ENTRIES)];
        me.receive_vectors(step, words);
#pragma unroll
        for (int row = 0; row < CHANNELS; row += MMA_ROWS) me.multiply_rows<D_ROW_ENTRIES>(words, row, MMA_ROWS, row);
        me.receive_sums<LATE_SUM_WORDS>(me.mail.late_sums, step, FIRST_LATE_TOTAL);
        me.sync();
        for (int s = me.warp; s < me.sequences; s += WARPS) backprop_B_and_C(cell, me, t, s);
        if (me.has_any_timed_out()) return abandon_backward(cell, me, items);
        compute_carried(cell, me, t, small_weight, items);
        me.sync();  // before load_record overwrites what compute_carried reads
    }
    store_sums_over_tokens(cell, me, items);
}
