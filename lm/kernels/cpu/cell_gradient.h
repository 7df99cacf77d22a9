// Backpropagation through one token: from the gradients of y_t and h_t to those of its inputs.
//
// Notation: λ is the gradient of y_t, μ of h_t, `d_past` of past + γ ⊙ x̃; θ = g γ; w is the norm's
// weight; z(λ) the gradient of U x̃ through y (linear in λ).
//   ḡ = Tᵀ (z(λ) + U (dt ⊙ μ B))       gradient of the root s
//   η = (I − φ′)⁻ᵀ ḡ                    implicit function theorem, with φ′ᵀ_i = Tᵀ z(u_i)
// Afterwards s is treated as a constant, and λ + Uᵀ η as the gradient of y_t.

#pragma once

#include "cell_token.h"

namespace {

// Sums over tokens, stored per sequence, so that results do not depend on the number of threads.
template <class T> struct Sums {
    int64_t A_size, d;  // entries of A, and channels
    std::vector<T> dA, dD, d_weight, d_bias;
    explicit Sums(const Cell &cell)
        : A_size(cell.kind == MAMBA1 ? cell.states * cell.channels : cell.kind == MAMBA2 ? cell.heads : 0),
          d(cell.channels), dA(cell.batch * A_size), dD(cell.batch * d), d_weight(dD.size()), d_bias(dD.size()) {}
};

// Gradients that a group of sequences carries from token to token, and one recomputed chunk.
template <class T> struct BackwardWork {
    int64_t width, state_size;           // entries of a padded row of d channels, and of a padded state
    std::vector<Token<T>> tokens;        // (sequence, step)
    T *H;                                // (sequence, step, n, d): states after their decay
    T *mu, *d_y_before;                  // (sequence, n, d), (sequence, width)
    T *lambda, *v, *d_past, *d_mixed, *mu_B, *ddt, *d_log_decay, *inflow, *d_u;  // (d) each, of one token
    T *dB, *dC, *zeros;                  // (groups·n), zeros (d)
    std::vector<Vec<T>> dB_lanes, dC_lanes;
    std::vector<double> max_lambda_norm;  // (sequence): largest ‖λ‖ so far
    Arena<T> arena;

    static int64_t size(const Cell &cell, int64_t count) {
        const auto round_up = Arena<T>::round_up;
        const int64_t d = round_up(cell.channels), state = round_up(cell.states * cell.channels);
        const int64_t step = Token<T>::size(cell) + (cell.kind == RNN ? 0 : state);
        return count * (cell.checkpoint_interval * step + state + d) + (cell.rank + 9) * d +
               3 * round_up(std::max(cell.channels, cell.groups * cell.states));
    }
    BackwardWork(const Cell &cell, int64_t count)
        : width(Arena<T>::round_up(cell.channels)), state_size(Arena<T>::round_up(cell.states * cell.channels)),
          dB_lanes(cell.groups * cell.states), dC_lanes(dB_lanes.size()), max_lambda_norm(count),
          arena(size(cell, count)) {
        for (int64_t i = 0; i < count * cell.checkpoint_interval; ++i) tokens.emplace_back(cell, arena);
        H = cell.kind == RNN ? nullptr : arena.take(count * cell.checkpoint_interval * state_size);
        mu = arena.take(count * state_size);
        d_y_before = arena.take(count * width);
        for (T **pointer : {&lambda, &v, &d_past, &d_mixed, &mu_B, &ddt, &d_log_decay, &inflow})
            *pointer = arena.take(cell.channels);
        d_u = arena.take(cell.rank * cell.channels);
        for (T **pointer : {&dB, &dC}) *pointer = arena.take(cell.groups * cell.states);
        zeros = arena.take(std::max(cell.channels, cell.groups * cell.states));
        std::fill(mu, mu + count * state_size, T(0));
        std::fill(d_y_before, d_y_before + count * width, T(0));
        std::fill(zeros, zeros + std::max(cell.channels, cell.groups * cell.states), T(0));
    }
};

// Small vectors of one token.
struct TokenGradient : MapGradient {
    double mean_lambda, mean_lambda_normed;       // mean of wλ (0 unless the norm centres), mean of wλ v̂
    double mean_u[MAX_REFLECTIONS], mean_u_normed[MAX_REFLECTIONS];  // the same for w u_i
};

// Recompute the tokens of a chunk from the saved roots: vectors, x̃, and states after their decay.
template <class T, int R>
void recompute_chunk(const Cell &cell, int64_t sequence, int64_t first, int64_t steps, Token<T> *tokens, T *H,
                     BackwardWork<T> &work) {
    const int64_t d = cell.channels, n = cell.states;
    const int64_t checkpoint = sequence * count_chunks(cell) + first / cell.checkpoint_interval;
    const T *B_before = work.zeros, *h = nullptr;
    if (cell.kind != RNN) h = input<T>(cell.checkpoints) + checkpoint * n * d;
    for (int64_t t = 0; t < steps; ++t) {
        const int64_t token_index = sequence * cell.length + first + t;
        Token<T> &token = tokens[t];
        prepare_token<T, R>(cell, token_index, find_row<T>(cell, token_index), token);
        if (cell.kind == RNN) {
            h = find_previous_y<T>(cell, token_index, cell.h0);
            if (!h) h = work.zeros;
            advance_state<T>(cell, token, T(1), work.zeros, work.zeros, h, nullptr);
        } else {
            const T keep_t = cell.keep ? input<T>(cell.keep)[token_index] : T(1);
            advance_state<T>(cell, token, keep_t, t ? work.inflow : work.zeros, B_before, h, H + t * work.state_size);
            h = H + t * work.state_size;
            B_before = token.B;
        }
        for (int64_t i = 0; i < cell.rank; ++i) token.root[i] = input<T>(cell.roots)[token_index * cell.rank + i];
        compute_mixed<T, R>(cell, token_index, token);
        for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
            store<T>(work.inflow + c, load<T>(token.dt + c, lanes) * load<T>(token.mixed + c, lanes), lanes);
        });
    }
}

// Compute μ B (d) and the gradient of B, Σ_c μ dt x̃, from the gradient of the state after the token.
template <class T>
void backprop_inflow(const Cell &cell, const Token<T> &token, const T *mu, BackwardWork<T> &work) {
    std::fill(work.dB_lanes.begin(), work.dB_lanes.end(), Vec<T>{});
    for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> inflow = load<T>(token.dt + c, lanes) * load<T>(token.mixed + c, lanes);
        Vec<T> sum{};
        for (int64_t i = 0; i < cell.states; ++i) {
            const Vec<T> mu_i = load<T>(mu + i * cell.channels + c, lanes);
            sum += mu_i * token.B[g * cell.states + i];
            work.dB_lanes[g * cell.states + i] += mu_i * inflow;
        }
        store<T>(work.mu_B + c, sum, lanes);
    });
    for (int64_t i = 0; i < cell.groups * cell.states; ++i) work.dB[i] = sum_lanes<T>(work.dB_lanes[i]);
}

// Write λ = ∂y + d_y_before into work.lambda (RNN: plus μ), and update the largest ‖∂y + d_y_before‖.
template <class T>
void gather_lambda(const Cell &cell, int64_t token_index, int64_t i, BackwardWork<T> &work) {
    Vec<T> squares{};
    for_each_block<T>(cell.channels, [&](int64_t c, int64_t lanes) {
        Vec<T> lambda = load<T>(input<T>(cell.grad_y) + token_index * cell.channels + c, lanes);
        lambda += load<T>(work.d_y_before + i * work.width + c, lanes);
        squares += lambda * lambda;
        if (cell.kind == RNN) lambda += load<T>(work.mu + i * work.state_size + c, lanes);
        store<T>(work.lambda + c, lambda, lanes);
    });
    const double norm = std::sqrt(double(sum_lanes<T>(squares)));
    if (!(norm <= work.max_lambda_norm[i])) work.max_lambda_norm[i] = norm;
}

// Replace v by v̂, its normed value, and compute in one pass φ′, ḡ and the means of the norm's gradient.
template <class T, int R>
void compute_sums(const Cell &cell, int64_t token_index, const Token<T> &token, T mean, T inverse,
                  BackwardWork<T> &work, TokenGradient &grads) {
    constexpr int M = R ? R : MAX_REFLECTIONS;
    const int r = rank_of<R>(cell.rank);
    Vec<T> sum_lambda{}, sum_lambda_normed{}, sum_u[M] = {}, sum_u_normed[M] = {};
    Vec<T> sum_theta[M] = {}, sum_theta_normed[M] = {}, theta_lambda[M] = {}, theta_u[M][M] = {}, z_state[M] = {};
    for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> normed = zero_padding_lanes<T>((load<T>(work.v + c, lanes) - mean) * inverse, lanes);
        store<T>(work.v + c, normed, lanes);
        const Vec<T> weight = load_or_default<T>(cell.norm_weight, c, lanes, 1);
        const Vec<T> lambda = load<T>(work.lambda + c, lanes) * weight;
        const Vec<T> dt = load<T>(token.dt + c, lanes);
        const Vec<T> gate = cell.gate ? load<T>(input<T>(cell.gate) + token_index * cell.channels + c, lanes)
                                   : broadcast<T>(1);
        const Vec<T> theta = (dt * token.bc[g] + load_or_default<T>(cell.D, c, lanes, 0)) * gate;
        const Vec<T> d_mixed = dt * load<T>(work.mu_B + c, lanes);
        sum_lambda += lambda;
        sum_lambda_normed += lambda * normed;
        Vec<T> u[M];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(token.u + i * cell.channels + c, lanes);
            sum_u[i] += u[i] * weight;
            sum_u_normed[i] += u[i] * weight * normed;
        }
        for (int l = 0; l < r; ++l) {
            const Vec<T> theta_u_l = theta * u[l];
            sum_theta[l] += theta_u_l;
            sum_theta_normed[l] += theta_u_l * normed;
            theta_lambda[l] += theta_u_l * lambda;
            z_state[l] += u[l] * d_mixed;
            for (int i = 0; i < r; ++i) theta_u[l][i] += theta_u_l * weight * u[i];
        }
    });
    const double mean_factor = cell.norm == LAYER ? 1.0 / cell.channels : 0;
    const double mean_normed_factor = cell.norm == NONE ? 0 : 1.0 / cell.channels;
    grads.mean_lambda = sum_lanes<T>(sum_lambda) * mean_factor;
    grads.mean_lambda_normed = sum_lanes<T>(sum_lambda_normed) * mean_normed_factor;
    double z[MAX_REFLECTIONS], z_u[MAX_REFLECTIONS][MAX_REFLECTIONS];
    for (int i = 0; i < r; ++i) {
        grads.mean_u[i] = sum_lanes<T>(sum_u[i]) * mean_factor;
        grads.mean_u_normed[i] = sum_lanes<T>(sum_u_normed[i]) * mean_normed_factor;
    }
    for (int l = 0; l < r; ++l) {
        const double sum = sum_lanes<T>(sum_theta[l]), normed = sum_lanes<T>(sum_theta_normed[l]);
        z[l] = sum_lanes<T>(theta_lambda[l]) - grads.mean_lambda * sum - grads.mean_lambda_normed * normed;
        z[l] = inverse * z[l] + sum_lanes<T>(z_state[l]);
        for (int i = 0; i < r; ++i) {
            z_u[l][i] = sum_lanes<T>(theta_u[l][i]) - grads.mean_u[i] * sum - grads.mean_u_normed[i] * normed;
            z_u[l][i] *= inverse;
        }
    }
    backprop_root<R>(r, token, z, grads.d_root);
    compute_phi_slope<R>(r, token, z_u, grads.phi_slope);
}

// Given η, compute the gradients of the norm, the gate, D, past, x̃, B·C of each group (d_bc),
// and dt without the part of the state.
template <class T, int R>
void backprop_y(const Cell &cell, int64_t token_index, int64_t sequence, const Token<T> &token, T inverse,
                BackwardWork<T> &work, TokenGradient &grads, Sums<T> &sums, double *d_bc) {
    constexpr int M = R ? R : MAX_REFLECTIONS;
    const int r = rank_of<R>(cell.rank);
    const int64_t d = cell.channels;
    double mean = grads.mean_lambda, mean_normed = grads.mean_lambda_normed;
    for (int i = 0; i < r; ++i) {
        mean += grads.eta[i] * grads.mean_u[i];
        mean_normed += grads.eta[i] * grads.mean_u_normed[i];
    }
    T *d_weight = &sums.d_weight[sequence * d], *d_bias = &sums.d_bias[sequence * d], *dD = &sums.dD[sequence * d];
    Vec<T> d_mix_weights[M] = {}, products{};
    int64_t group = 0;
    const auto end_group = [&] { d_bc[group] = sum_lanes<T>(products); };
    for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
        if (g != group) {
            end_group();
            products = Vec<T>{};
            group = g;
        }
        const Vec<T> normed = load<T>(work.v + c, lanes), dt = load<T>(token.dt + c, lanes);
        const Vec<T> mixed = load<T>(token.mixed + c, lanes), mu_B = load<T>(work.mu_B + c, lanes);
        const Vec<T> gamma = dt * token.bc[g] + load_or_default<T>(cell.D, c, lanes, 0);
        Vec<T> lambda = load<T>(work.lambda + c, lanes);
        for (int i = 0; i < r; ++i) lambda += load<T>(token.u + i * d + c, lanes) * T(grads.eta[i]);
        if (cell.d_norm_weight) store<T>(d_weight + c, load<T>(d_weight + c, lanes) + lambda * normed, lanes);
        if (cell.d_norm_bias) store<T>(d_bias + c, load<T>(d_bias + c, lanes) + lambda, lanes);
        const Vec<T> d_normed = lambda * load_or_default<T>(cell.norm_weight, c, lanes, 1);
        Vec<T> d_past = d_normed - T(mean) - normed * T(mean_normed);
        d_past *= inverse;
        if (cell.gate) {
            const Vec<T> ungated = load<T>(token.past + c, lanes) + gamma * mixed;
            store<T>(output<T>(cell.d_gate) + token_index * d + c, d_past * ungated, lanes);
            d_past *= load<T>(input<T>(cell.gate) + token_index * d + c, lanes);
        }
        d_past = zero_padding_lanes<T>(d_past, lanes);
        const Vec<T> d_gamma = d_past * mixed, d_mixed = gamma * d_past + dt * mu_B;
        store<T>(work.d_past + c, d_past, lanes);
        store<T>(work.d_mixed + c, d_mixed, lanes);
        store<T>(work.ddt + c, d_gamma * token.bc[g] + mixed * mu_B, lanes);
        if (cell.dD) store<T>(dD + c, load<T>(dD + c, lanes) + d_gamma, lanes);
        products += d_gamma * dt;
        for (int i = 0; i < r; ++i) d_mix_weights[i] += load<T>(token.u + i * d + c, lanes) * d_mixed;
    });
    end_group();
    for (int i = 0; i < r; ++i) grads.d_mix_weights[i] = sum_lanes<T>(d_mix_weights[i]);
}

// Return act'(v).
template <class T, int act> inline Vec<T> act_slope(Vec<T> v) {
    if constexpr (act == SILU) {
        const Vec<T> gate = T(1) / (T(1) + exponential<T>(-v));
        return gate * (T(1) + v * (T(1) - gate));
    }
    if constexpr (act == RELU) return v > T(0) ? broadcast<T>(1) : Vec<T>{};
    return broadcast<T>(1);
}

// Backpropagate through u = nrm(act(from)): write factor (d_u − radial u) act'(from) into `to`. radial is
// u·d_u, which nrm removes.
template <class T, int act>
void backprop_act(int64_t d, const T *from, const T *u, const T *d_u, T radial, T factor, T *to) {
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> d_act = (load<T>(d_u + c, lanes) - load<T>(u + c, lanes) * radial) * factor;
        store<T>(to + c, d_act * act_slope<T, act>(load<T>(from + c, lanes)), lanes);
    });
}

// Compute the gradients of x and of the vectors before act and nrm.
template <class T, int R>
void backprop_vectors(const Cell &cell, int64_t token_index, const T *row, const Token<T> &token,
                      const TokenGradient &grads, BackwardWork<T> &work) {
    constexpr int M = R ? R : MAX_REFLECTIONS;
    const int r = rank_of<R>(cell.rank);
    const int64_t d = cell.channels;
    T *d_row = output<T>(cell.d_raw) + token_index * cell.columns + cell.vectors;
    Vec<T> dots[M] = {};
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> x = load<T>(input<T>(cell.x) + token_index * d + c, lanes);
        const Vec<T> y = load<T>(input<T>(cell.y) + token_index * d + c, lanes);
        const Vec<T> d_mixed = load<T>(work.d_mixed + c, lanes);
        Vec<T> dx = d_mixed, u[M];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(token.u + i * d + c, lanes);
            dx += u[i] * T(grads.d_Ux[i]);
        }
        store<T>(output<T>(cell.dx) + token_index * d + c, dx, lanes);
        for (int i = 0; i < r; ++i) {
            Vec<T> d_u = d_mixed * T(token.mix_weights[i]) + y * T(grads.eta[i]) + x * T(grads.d_Ux[i]);
            for (int j = 0; j < r && cell.sequential; ++j)
                if (j != i) d_u += u[j] * T(grads.d_gram[i][j]);
            dots[i] += d_u * u[i];
            store<T>(work.d_u + i * d + c, d_u, lanes);
        }
    });
    for (int i = 0; i < r; ++i) {
        const bool is_floored = token.length[i] < cell.eps;  // nrm divides by eps, which is constant
        const T radial = is_floored ? T(0) : sum_lanes<T>(dots[i]);
        const T factor = T(1 / max_length(token.length[i], cell.eps));
        const auto backprop = cell.act == SILU   ? backprop_act<T, SILU>
                             : cell.act == RELU ? backprop_act<T, RELU>
                                             : backprop_act<T, IDENTITY>;
        const T *from = row + cell.vectors + i * d;
        backprop(d, from, token.u + i * d, work.d_u + i * d, radial, factor, d_row + i * d);
    }
}

// Backpropagate from past = H C and μ to the state before the token (in place of μ), to dt (added to work.ddt), A
// and C.
template <class T>
void backprop_state(const Cell &cell, const Token<T> &token, T keep_t, const T *H, T *mu, BackwardWork<T> &work,
                    T *dA) {
    const int64_t n = cell.states, d = cell.channels;
    const T *A = input<T>(cell.A);
    std::fill(work.dC_lanes.begin(), work.dC_lanes.end(), Vec<T>{});
    const auto pass = [&](auto compute_decay, auto backprop_log_decay) {
        for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
            const Vec<T> d_past = load<T>(work.d_past + c, lanes), dt = load<T>(token.dt + c, lanes);
            const Vec<T> decay = load<T>(token.decay + c, lanes);
            const T *C = token.C + g * n;
            Vec<T> sum{};
            for (int64_t i = 0; i < n; ++i) {
                const int64_t entry = i * d + c;
                const Vec<T> H_i = load<T>(H + entry, lanes);
                const Vec<T> dH = load<T>(mu + entry, lanes) + d_past * C[i];
                work.dC_lanes[g * n + i] += d_past * H_i;
                sum += backprop_log_decay(entry, lanes, dH * H_i, dt);
                store<T>(mu + entry, dH * compute_decay(entry, lanes, dt, decay), lanes);
            }
            store<T>(work.d_log_decay + c, sum, lanes);
        });
    };
    if (cell.kind == MAMBA1)
        pass(
            [&](int64_t entry, int64_t lanes, Vec<T> dt, Vec<T>) {
                return exponential<T>(dt * load<T>(A + entry, lanes)) * keep_t;
            },
            [&](int64_t entry, int64_t lanes, Vec<T> d_log_decay, Vec<T> dt) {
                store<T>(dA + entry, load<T>(dA + entry, lanes) + d_log_decay * dt, lanes);
                return d_log_decay * load<T>(A + entry, lanes);
            });
    else
        pass([](int64_t, int64_t, Vec<T>, Vec<T> decay) { return decay; },
             [](int64_t, int64_t, Vec<T> d_log_decay, Vec<T>) { return d_log_decay; });
    for (int64_t i = 0; i < cell.groups * n; ++i) work.dC[i] = sum_lanes<T>(work.dC_lanes[i]);
    for (int64_t c = 0, head_width = d / cell.heads; c < d; ++c) {
        if (cell.kind == MAMBA1) {
            work.ddt[c] += work.d_log_decay[c];
        } else {
            work.ddt[c] += work.d_log_decay[c] * A[c / head_width];
            dA[c / head_width] += work.d_log_decay[c] * token.dt[c];
        }
    }
}

// Backpropagate from B or C, and from B·C, to their part of the row.
template <class T>
void backprop_units(const Cell &cell, T *gradient, const T *unit, const T *other_unit, const double *d_bc,
                   const T *lengths, T *d_row) {
    for (int64_t g = 0, n = cell.states; g < cell.groups; ++g) {
        double dot = 0;
        for (int64_t i = g * n; i < (g + 1) * n; ++i) {
            gradient[i] += T(d_bc[g]) * other_unit[i];
            dot += double(gradient[i]) * unit[i];
        }
        const T radial = !cell.bc_norm || lengths[g] < cell.eps ? T(0) : T(dot);
        const T factor = cell.bc_norm ? T(1 / max_length(lengths[g], cell.eps)) : T(1);
        for (int64_t i = g * n; i < (g + 1) * n; ++i)
            d_row[i] = (gradient[i] - radial * unit[i]) * factor;
    }
}

}  // namespace
