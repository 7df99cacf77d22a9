// Forward pass of the exact solve, all tokens in one launch: FP-Mamba-1 with up to four reflections.
//
// lm/kernels/cell_arguments.py has the equations, team.h says how blocks work together. A token:
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
// The equation and the norm need only these sums: with v_i the vector of a reflection after its
// activation, the output before the norm is f + Σ_i θ_i m_i with f = g (past + γ x) and m_i = g γ v_i. past
// is the part of the output from the states of earlier tokens, γ = Δ B·C + D, and g is the output gate.
// θ = τ (s − U x), where s is the root of the equation, u_i = v_i / LENGTH_i, τ_ij = T_ij / LENGTH_i and
// LENGTH_i is max(‖v_i‖, eps).
//
// Each kind of mail has one buffer, because no block overwrites a word that another one has not read.
// A block overwrites y_{t−1} by y_t only after it has all sums of token t, and a block that has sent
// those sums has read all of y_{t−1}. It overwrites the sums of t − 1 only after it has all of y_{t−1},
// and a block that has sent y_{t−1} has read all sums of t − 1. The same holds for the small rows.

#pragma once

#include "team.h"

// The sums over channels of one sequence, in the order of the words that carry them. The names list the
// factors of the terms: V is v, X is x, F is f, M is m, W is the norm's weight, B its bias. There is one
// sum per pair of reflections for two factors V or M, and one per reflection for one.
enum ForwardSum {
    VV,
    VX = VV + PAIRS,
    F = VX + REFLECTIONS,
    M,
    FF = M + REFLECTIONS,
    FM,
    MM = FM + REFLECTIONS,
    WVF = MM + PAIRS,
    WVM = WVF + REFLECTIONS,
    WV = WVM + PAIRS,
    VB = WV + REFLECTIONS
};
static_assert(VB + REFLECTIONS == FORWARD_SUMS);

namespace {
// Reflections of a sequence's token: x̃ = x + Σ_i v_i (Σ_j τ_ij s_j − k_i) for the root s.
struct Reflections : ReflectionMap {
    double length[REFLECTIONS], u_x[REFLECTIONS], tau[REFLECTIONS][REFLECTIONS], k[REFLECTIONS];

    DEVICE Reflections(const Cell &cell, const double *sum, const float *gate_entries) {
        for (int i = 0; i < REFLECTIONS; ++i) {
            length[i] = at_least(sqrt(float(sum[VV + pair_index(i, i)])), cell.eps);
            u_x[i] = sum[VX + i] / length[i];
            gate[i] = cell.scale / (1 + exp(-double(gate_entries[i])));
            for (int j = 0; j < i; ++j) gram[i][j] = sum[VV + pair_index(i, j)] / (length[i] * length[j]);
        }
        compute_reflection_map<REFLECTIONS>(REFLECTIONS, cell.sequential, cell.kappa, *this);
        for (int i = 0; i < REFLECTIONS; ++i) {
            k[i] = 0;
            for (int j = 0; j < REFLECTIONS; ++j) {
                tau[i][j] = map[i][j] / length[i];
                k[i] += tau[i][j] * u_x[j];
            }
        }
    }
};
}  // namespace

// Means of f and m over channels, 0 for RMSNorm, and means or sums of the products of f − mean_f and
// m − mean_m: ff, fm and mm are means, w v f and w v m are sums.
struct CentredSums {
    double mean_f, mean_m[REFLECTIONS], ff, fm[REFLECTIONS], mm[REFLECTIONS][REFLECTIONS];
    double wvf[REFLECTIONS], wvm[REFLECTIONS][REFLECTIONS];

    DEVICE CentredSums(const Cell &cell, const double *sum) {
        const double d = D_INNER;
        mean_f = cell.layer_norm ? sum[F] / d : 0;
        ff = sum[FF] / d - mean_f * mean_f;
        for (int i = 0; i < REFLECTIONS; ++i) {
            mean_m[i] = cell.layer_norm ? sum[M + i] / d : 0;
            fm[i] = sum[FM + i] / d - mean_f * mean_m[i];
            wvf[i] = sum[WVF + i] - mean_f * sum[WV + i];
        }
        for (int i = 0; i < REFLECTIONS; ++i)
            for (int j = 0; j < REFLECTIONS; ++j) {
                mm[i][j] = sum[MM + pair_index(i, j)] / d - mean_m[i] * mean_m[j];
                wvm[i][j] = sum[WVM + pair_index(i, j)] - mean_m[j] * sum[WV + i];
            }
    }
};

// Compute the coefficients of φ (cell_equation.h).
DEVICE void compute_coefficients(const Cell &cell, const double *sum, const Reflections &of,
                                 const CentredSums &centred, Equation &e) {
    e.gamma0 = centred.ff;
    for (int i = 0; i < REFLECTIONS; ++i) e.gamma0 -= 2 * of.k[i] * centred.fm[i];
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) e.gamma0 += of.k[i] * of.k[j] * centred.mm[i][j];
    e.gamma0 += cell.norm_eps;
    e.floor = cell.norm_eps;
    e.rounding = 0x1p-23;
    for (int i = 0; i < REFLECTIONS; ++i) {
        double alpha = centred.wvf[i];
        for (int l = 0; l < REFLECTIONS; ++l) alpha -= of.k[l] * centred.wvm[i][l];
        e.alpha[i] = alpha / of.length[i];
        e.delta[i] = sum[VB + i] / of.length[i];
        e.gamma1[i] = 0;
        for (int j = 0; j < REFLECTIONS; ++j) e.beta[i][j] = e.gamma2[i][j] = 0;
    }
    for (int l = 0; l < REFLECTIONS; ++l) {
        double slant = centred.fm[l];
        for (int p = 0; p < REFLECTIONS; ++p) slant -= of.k[p] * centred.mm[l][p];
        for (int j = 0; j <= l; ++j) {  // τ_lj is 0 for j > l
            e.gamma1[j] += of.tau[l][j] * slant;
            for (int i = 0; i < REFLECTIONS; ++i)
                e.beta[i][j] += of.tau[l][j] / of.length[i] * centred.wvm[i][l];
            for (int p = 0; p < REFLECTIONS; ++p)
                for (int i = 0; i <= p; ++i) e.gamma2[j][i] += of.tau[l][j] * of.tau[p][i] * centred.mm[l][p];
        }
    }
}

// Write the record of a sequence for the root s, without B·C and the lengths of B and C, which
// normalize_B_and_C has written.
DEVICE void write_record(const Cell &cell, const double *sum, const Reflections &of, const CentredSums &centred,
                         const double *root, float *record) {
    const double d = D_INNER;
    double theta[REFLECTIONS], mean = centred.mean_f, variance = centred.ff;
    for (int i = 0; i < REFLECTIONS; ++i) {
        theta[i] = 0;
        for (int j = 0; j <= i; ++j)  // the root is rounded as in the CPU kernel, which saves it
            theta[i] += of.tau[i][j] * (double(float(root[j])) - of.u_x[j]);
        mean += theta[i] * centred.mean_m[i];
    }
    for (int i = 0; i < REFLECTIONS; ++i) {
        double slope = 2 * centred.fm[i];
        for (int j = 0; j < REFLECTIONS; ++j) slope += theta[j] * centred.mm[i][j];
        variance += theta[i] * slope;
    }
    const double inverse = 1 / sqrt((variance < 0 ? 0 : variance) + cell.norm_eps);
    record[MEAN] = mean;
    record[INVERSE] = inverse;
    for (int i = 0; i < REFLECTIONS; ++i) {
        double wv_n = sum[WVF + i], n_m = sum[FM + i];
        for (int j = 0; j < REFLECTIONS; ++j) {
            wv_n += theta[j] * sum[WVM + pair_index(i, j)];
            n_m += theta[j] * sum[MM + pair_index(i, j)];
        }
        wv_n = (wv_n - mean * sum[WV + i]) * inverse;
        n_m = (n_m - mean * sum[M + i]) * inverse;
        record[THETA + i] = theta[i];
        record[LENGTH + i] = of.length[i];
        record[U_X + i] = of.u_x[i];
        record[U_Y + i] = (wv_n + sum[VB + i]) / of.length[i];
        record[DISTANCE + i] = double(float(root[i])) - of.u_x[i];
        record[MEAN_U + i] = cell.layer_norm ? sum[WV + i] / of.length[i] / d : 0;
        record[ALONG_U + i] = wv_n / of.length[i] / d;
        record[SUM_M + i] = sum[M + i] / of.length[i];
        record[SUM_NM + i] = n_m / of.length[i];
    }
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) {
            const double slope = sum[WVM + pair_index(i, j)] / (of.length[i] * of.length[j]) -
                                 double(record[MEAN_U + j]) * record[SUM_M + i] -
                                 double(record[ALONG_U + j]) * record[SUM_NM + i];
            record[SLOPE + i * REFLECTIONS + j] = slope * inverse;
            if (j < i) record[GRAM + pair_index(i, j)] = of.gram[i][j];
        }
}

// Compute φ′ from a record.
DEVICE void compute_recorded_slope(const float *record, const ReflectionMap &map,
                                   double (*phi_slope)[MAX_REFLECTIONS]) {
    double z_u[REFLECTIONS][MAX_REFLECTIONS];
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) z_u[i][j] = record[SLOPE + i * REFLECTIONS + j];
    compute_phi_slope<REFLECTIONS>(REFLECTIONS, map, z_u, phi_slope);
}

// Solve the equation of a sequence and write its record. Return the outcome.
DEVICE int solve_sequence(const Cell &cell, const double *sum, const float *gate_entries, float *record) {
    const Reflections reflections(cell, sum, gate_entries);
    const CentredSums centred(cell, sum);
    Equation e;
    compute_coefficients(cell, sum, reflections, centred, e);
    double root[MAX_REFLECTIONS], M[MAX_REFLECTIONS][MAX_REFLECTIONS];
    int outcome = solve<REFLECTIONS>(e, REFLECTIONS, root);
    write_record(cell, sum, reflections, centred, root, record);
    compute_recorded_slope(record, reflections, M);
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) M[i][j] = (i == j) - M[i][j];  // I − φ′
    if (!(outcome & FAILED) && is_gain_limited<REFLECTIONS>(M, REFLECTIONS)) outcome |= GRAD_LIMITED;
    return outcome;
}

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
