// Backpropagation through one token: from the gradients of y_t and h_t to those of its inputs.
//
// Notation: λ is the gradient of y_t, μ the gradient of h_t, θ = g γ, e the gradient of past + γ ⊙ x̃,
// and z(λ) the gradient of U x̃ through y (linear in λ).
//   ḡ = Tᵀ (z(λ) + U (dt ⊙ μ B))       gradient of the root s
//   η = (I − φ′)⁻ᵀ ḡ                    implicit function theorem, with φ′ᵀ_i = Tᵀ z(u_i)
// Afterwards s is treated as a constant, and λ + Uᵀ η as the gradient of y_t.

#pragma once

#include "cell_token.h"

namespace {

// Sums over tokens, stored per sequence, so that results do not depend on the number of threads.
template <class T> struct Sums {
    int64_t A, d;  // sizes
    std::vector<T> dA, dD, d_weight, d_bias;
    explicit Sums(const Cell &p)
        : A(p.kind == MAMBA1 ? p.states * p.channels : p.kind == MAMBA2 ? p.heads : 0),
          d(p.channels), dA(p.rows * A), dD(p.rows * d), d_weight(dD.size()), d_bias(dD.size()) {}
};

// Gradients that a group of sequences carries from token to token, and one recomputed chunk.
template <class T> struct Backward {
    int64_t width, state;
    std::vector<Token<T>> tokens;        // (sequence, step)
    T *H;                                // (sequence, step, n, d): states after their decay
    T *mu, *carried;                     // (sequence, n, d), (sequence, width)
    T *lambda, *v, *e, *d_mixed, *mu_B, *ddt, *d_log, *inflow, *d_u;  // (d) each, of one token
    T *dB, *dC, *zeros;                  // (groups·n), zeros (d)
    std::vector<Vec<T>> lanes_B, lanes_C;
    std::vector<double> largest;         // (sequence): largest ‖λ‖ of the tokens done
    Arena<T> arena;

    static int64_t size(const Cell &p, int64_t count) {
        const auto round_up = Arena<T>::round_up;
        const int64_t d = round_up(p.channels), state = round_up(p.states * p.channels);
        const int64_t step = Token<T>::size(p) + (p.kind == RNN ? 0 : state);
        return count * (p.every * step + state + d) + (p.rank + 9) * d +
               3 * round_up(std::max(p.channels, p.groups * p.states));
    }
    Backward(const Cell &p, int64_t count)
        : width(Arena<T>::round_up(p.channels)), state(Arena<T>::round_up(p.states * p.channels)),
          lanes_B(p.groups * p.states), lanes_C(lanes_B.size()), largest(count),
          arena(size(p, count)) {
        for (int64_t i = 0; i < count * p.every; ++i) tokens.emplace_back(p, arena);
        H = p.kind == RNN ? nullptr : arena.take(count * p.every * state);
        mu = arena.take(count * state);
        carried = arena.take(count * width);
        for (T **pointer : {&lambda, &v, &e, &d_mixed, &mu_B, &ddt, &d_log, &inflow})
            *pointer = arena.take(p.channels);
        d_u = arena.take(p.rank * p.channels);
        for (T **pointer : {&dB, &dC}) *pointer = arena.take(p.groups * p.states);
        zeros = arena.take(std::max(p.channels, p.groups * p.states));
        std::fill(mu, mu + count * state, T(0));
        std::fill(carried, carried + count * width, T(0));
        std::fill(zeros, zeros + std::max(p.channels, p.groups * p.states), T(0));
    }
};

// Small vectors and matrices of one token.
struct TokenGradient {
    double mean_lambda, along_lambda;       // mean of wλ (0 unless the norm centres), mean of wλ v̂
    double mean_u[MAX_REFLECTIONS], along_u[MAX_REFLECTIONS];  // the same for w u_i
    double slope[MAX_REFLECTIONS][MAX_REFLECTIONS];            // φ′
    double received[MAX_REFLECTIONS], eta[MAX_REFLECTIONS];    // ḡ, η
    double d_mix_weights[MAX_REFLECTIONS];  // gradient of T (s − U x)
    double d_Ux[MAX_REFLECTIONS];           // gradient of U x
    double d_gate[MAX_REFLECTIONS];
    double d_gram[MAX_REFLECTIONS][MAX_REFLECTIONS];           // symmetric
};

// Recompute the tokens of a chunk from the saved roots: vectors, x̃, and states after their decay.
template <class T, int R>
void recompute_chunk(const Cell &p, int64_t row, int64_t first, int64_t steps, Token<T> *tokens, T *H,
           Backward<T> &f) {
    const int64_t d = p.channels, n = p.states, chunks = (p.length + p.every - 1) / p.every;
    const T *before = f.zeros, *h = nullptr;
    if (p.kind != RNN) h = in<T>(p.checkpoints) + (row * chunks + first / p.every) * n * d;
    for (int64_t t = 0; t < steps; ++t) {
        const int64_t index = row * p.length + first + t;
        Token<T> &k = tokens[t];
        const T *rows = p.saved_rows ? in<T>(p.saved_rows) + index * p.columns
                                    : in<T>(p.raw) + index * p.raw_step;
        prepare_token<T, R>(p, index, rows, k);
        if (p.kind == RNN) {
            h = first + t ? in<T>(p.y) + (index - 1) * d : p.h0 ? in<T>(p.h0) + row * d : f.zeros;
            advance_state<T>(p, k, T(1), f.zeros, f.zeros, h, nullptr);
        } else {
            const T keep_t = p.keep ? in<T>(p.keep)[index] : T(1);
            advance_state<T>(p, k, keep_t, t ? f.inflow : f.zeros, before, h, H + t * f.state);
            h = H + t * f.state;
            before = k.B;
        }
        for (int64_t i = 0; i < p.rank; ++i) k.root[i] = in<T>(p.roots)[index * p.rank + i];
        compute_mixed<T, R>(p, index, k);
        for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
            store<T>(f.inflow + c, load<T>(k.dt + c, lanes) * load<T>(k.mixed + c, lanes), lanes);
        });
    }
}

// Compute μ B (d) and the gradient of B, Σ_c μ dt x̃, from the gradient of the state after the token.
template <class T>
void backprop_inflow(const Cell &p, const Token<T> &k, const T *mu, Backward<T> &f) {
    std::fill(f.lanes_B.begin(), f.lanes_B.end(), Vec<T>{});
    for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> inflow = load<T>(k.dt + c, lanes) * load<T>(k.mixed + c, lanes);
        Vec<T> sum{};
        for (int64_t i = 0; i < p.states; ++i) {
            const Vec<T> mu_i = load<T>(mu + i * p.channels + c, lanes);
            sum += mu_i * k.B[g * p.states + i];
            f.lanes_B[g * p.states + i] += mu_i * inflow;
        }
        store<T>(f.mu_B + c, sum, lanes);
    });
    for (int64_t i = 0; i < p.groups * p.states; ++i) f.dB[i] = sum_lanes<T>(f.lanes_B[i]);
}

// Write λ = ∂y + carried into f.lambda (RNN: plus μ), and update the largest ‖∂y + carried‖.
template <class T>
void gather_lambda(const Cell &p, int64_t index, int64_t i, Backward<T> &f) {
    Vec<T> squares{};
    for_each_block<T>(p.channels, [&](int64_t c, int64_t lanes) {
        Vec<T> lambda = load<T>(in<T>(p.grad_y) + index * p.channels + c, lanes);
        lambda += load<T>(f.carried + i * f.width + c, lanes);
        squares += lambda * lambda;
        if (p.kind == RNN) lambda += load<T>(f.mu + i * f.state + c, lanes);
        store<T>(f.lambda + c, lambda, lanes);
    });
    const double size = std::sqrt(double(sum_lanes<T>(squares)));
    if (!(size <= f.largest[i])) f.largest[i] = size;
}

// Replace v by v̂, and compute in one pass φ′, ḡ and the means of the norm's gradient.
template <class T, int R>
void compute_sums(const Cell &p, int64_t index, const Token<T> &k, T mean, T inverse, Backward<T> &f,
            TokenGradient &s) {
    constexpr int M = R ? R : MAX_REFLECTIONS;
    const int r = rank_of<R>(p.rank);
    Vec<T> lambda1{}, lambda2{}, u1[M] = {}, u2[M] = {};
    Vec<T> theta1[M] = {}, theta2[M] = {}, theta_lambda[M] = {}, theta_u[M][M] = {}, state[M] = {};
    for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> normed = zero_padding_lanes<T>((load<T>(f.v + c, lanes) - mean) * inverse, lanes);
        store<T>(f.v + c, normed, lanes);
        const Vec<T> weight = load_or_default<T>(p.norm_weight, c, lanes, 1);
        const Vec<T> lambda = load<T>(f.lambda + c, lanes) * weight;
        const Vec<T> dt = load<T>(k.dt + c, lanes);
        const Vec<T> gate = p.gate ? load<T>(in<T>(p.gate) + index * p.channels + c, lanes)
                                   : broadcast<T>(1);
        const Vec<T> theta = (dt * k.bc[g] + load_or_default<T>(p.D, c, lanes, 0)) * gate;
        const Vec<T> into_state = dt * load<T>(f.mu_B + c, lanes);
        lambda1 += lambda;
        lambda2 += lambda * normed;
        Vec<T> u[M];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(k.u + i * p.channels + c, lanes);
            u1[i] += u[i] * weight;
            u2[i] += u[i] * weight * normed;
        }
        for (int l = 0; l < r; ++l) {
            const Vec<T> times = theta * u[l];
            theta1[l] += times;
            theta2[l] += times * normed;
            theta_lambda[l] += times * lambda;
            state[l] += u[l] * into_state;
            for (int i = 0; i < r; ++i) theta_u[l][i] += times * weight * u[i];
        }
    });
    const double centred = p.norm == LAYER ? 1.0 / p.channels : 0;
    const double scaled = p.norm == NONE ? 0 : 1.0 / p.channels;
    s.mean_lambda = sum_lanes<T>(lambda1) * centred;
    s.along_lambda = sum_lanes<T>(lambda2) * scaled;
    double z[MAX_REFLECTIONS], z_u[MAX_REFLECTIONS][MAX_REFLECTIONS];
    for (int i = 0; i < r; ++i) {
        s.mean_u[i] = sum_lanes<T>(u1[i]) * centred;
        s.along_u[i] = sum_lanes<T>(u2[i]) * scaled;
    }
    for (int l = 0; l < r; ++l) {
        const double one = sum_lanes<T>(theta1[l]), along = sum_lanes<T>(theta2[l]);
        z[l] = sum_lanes<T>(theta_lambda[l]) - s.mean_lambda * one - s.along_lambda * along;
        z[l] = inverse * z[l] + sum_lanes<T>(state[l]);
        for (int i = 0; i < r; ++i) {
            z_u[l][i] = sum_lanes<T>(theta_u[l][i]) - s.mean_u[i] * one - s.along_u[i] * along;
            z_u[l][i] *= inverse;
        }
    }
    for (int j = 0; j < r; ++j) {
        s.received[j] = 0;
        for (int i = 0; i < r; ++i) s.slope[i][j] = 0;
        for (int l = j; l < r; ++l) {
            s.received[j] += k.map[l][j] * z[l];
            for (int i = 0; i < r; ++i) s.slope[i][j] += z_u[l][i] * k.map[l][j];
        }
    }
}

// Compute η = (I − φ′)⁻ᵀ ḡ, shortened to MAX_GAIN ‖ḡ‖, because it is unbounded near a fold. If the
// search for the root failed, η is ḡ.
template <int R> void solve_adjoint(const Cell &p, bool has_failed, TokenGradient &s) {
    const int r = rank_of<R>(p.rank);
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS], before = 0, after = 0;
    for (int i = 0; i < r; ++i) {
        s.eta[i] = s.received[i];
        before += s.received[i] * s.received[i];
        for (int j = 0; j < r; ++j) M[i][j] = (i == j) - s.slope[j][i];
    }
    if (has_failed) return;
    eliminate<R>(M, s.eta, r);
    for (int i = 0; i < r; ++i) after += s.eta[i] * s.eta[i];
    const bool is_finite = after <= std::numeric_limits<double>::max();
    if (is_finite && after <= MAX_GAIN * MAX_GAIN * before) return;
    // A singular matrix gives no direction: use that of ḡ.
    const double times = is_finite ? MAX_GAIN * std::sqrt(before / after) : MAX_GAIN;
    for (int i = 0; i < r; ++i) s.eta[i] = times * (is_finite ? s.eta[i] : s.received[i]);
}

// Given η, compute the gradients of the norm, the gate, D, past (e), x̃, B·C of each group (d_bc),
// and dt without the part of the state.
template <class T, int R>
void backprop_y(const Cell &p, int64_t index, int64_t row, const Token<T> &k, T inverse, Backward<T> &f,
               TokenGradient &s, Sums<T> &sums, double *d_bc) {
    constexpr int M = R ? R : MAX_REFLECTIONS;
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    double mean = s.mean_lambda, along = s.along_lambda;
    for (int i = 0; i < r; ++i) {
        mean += s.eta[i] * s.mean_u[i];
        along += s.eta[i] * s.along_u[i];
    }
    T *d_weight = &sums.d_weight[row * d], *d_bias = &sums.d_bias[row * d], *dD = &sums.dD[row * d];
    Vec<T> d_mix_weights[M] = {}, products{};
    int64_t group = 0;
    const auto end_group = [&] { d_bc[group] = sum_lanes<T>(products); };
    for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        if (g != group) {
            end_group();
            products = Vec<T>{};
            group = g;
        }
        const Vec<T> normed = load<T>(f.v + c, lanes), dt = load<T>(k.dt + c, lanes);
        const Vec<T> mixed = load<T>(k.mixed + c, lanes), mu_B = load<T>(f.mu_B + c, lanes);
        const Vec<T> gamma = dt * k.bc[g] + load_or_default<T>(p.D, c, lanes, 0);
        Vec<T> lambda = load<T>(f.lambda + c, lanes);
        for (int i = 0; i < r; ++i) lambda += load<T>(k.u + i * d + c, lanes) * T(s.eta[i]);
        if (p.d_norm_weight) store<T>(d_weight + c, load<T>(d_weight + c, lanes) + lambda * normed, lanes);
        if (p.d_norm_bias) store<T>(d_bias + c, load<T>(d_bias + c, lanes) + lambda, lanes);
        Vec<T> e = lambda * load_or_default<T>(p.norm_weight, c, lanes, 1) - T(mean) - normed * T(along);
        e *= inverse;
        if (p.gate) {
            const Vec<T> round_up = load<T>(k.past + c, lanes) + gamma * mixed;
            store<T>(out<T>(p.d_gate) + index * d + c, e * round_up, lanes);
            e *= load<T>(in<T>(p.gate) + index * d + c, lanes);
        }
        e = zero_padding_lanes<T>(e, lanes);
        const Vec<T> d_gamma = e * mixed, d_mixed = gamma * e + dt * mu_B;
        store<T>(f.e + c, e, lanes);
        store<T>(f.d_mixed + c, d_mixed, lanes);
        store<T>(f.ddt + c, d_gamma * k.bc[g] + mixed * mu_B, lanes);
        if (p.dD) store<T>(dD + c, load<T>(dD + c, lanes) + d_gamma, lanes);
        products += d_gamma * dt;
        for (int i = 0; i < r; ++i) d_mix_weights[i] += load<T>(k.u + i * d + c, lanes) * d_mixed;
    });
    end_group();
    for (int i = 0; i < r; ++i) s.d_mix_weights[i] = sum_lanes<T>(d_mix_weights[i]);
}

// Backpropagate from T (s − U x) to U x, the gates and all u_i·u_j.
template <class T, int R> void backprop_map(const Cell &p, const Token<T> &k, TokenGradient &s) {
    const int r = rank_of<R>(p.rank);
    double d_unscaled_map[MAX_REFLECTIONS][MAX_REFLECTIONS], d_shrink = 0, sum = 0;
    for (int j = 0; j < r; ++j) {
        s.d_Ux[j] = s.d_gate[j] = 0;
        sum += k.gate[j];
        for (int l = j; l < r; ++l) {
            const double d_map = s.d_mix_weights[l] * (k.root[j] - k.Ux[j]);
            s.d_Ux[j] -= k.map[l][j] * s.d_mix_weights[l];
            d_shrink += d_map * k.unscaled_map[l][j];
            d_unscaled_map[l][j] = d_map * k.shrink;
        }
        for (int l = 0; l < r; ++l) s.d_gram[j][l] = 0;
    }
    for (int i = r - 1; i >= 0; --i)
        for (int j = 0; j <= i; ++j) {
            double entry = i == j;
            for (int l = j; l < i && p.sequential; ++l) {
                entry -= k.gram[i][l] * k.unscaled_map[l][j];
                s.d_gram[i][l] -= d_unscaled_map[i][j] * k.gate[i] * k.unscaled_map[l][j];
                d_unscaled_map[l][j] -= d_unscaled_map[i][j] * k.gate[i] * k.gram[i][l];
            }
            s.d_gate[i] += d_unscaled_map[i][j] * entry;
        }
    const bool is_shrunk = p.kappa > 0 && sum > p.kappa;
    for (int i = 0; i < r; ++i) {
        if (is_shrunk) s.d_gate[i] -= d_shrink * k.shrink / sum;
        s.d_gate[i] *= k.gate[i] * (1 - k.gate[i] / p.scale);  // through the sigmoid
        for (int l = 0; l < i; ++l) s.d_gram[l][i] = s.d_gram[i][l];
    }
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

// Backpropagate through u = nrm(act(from)): write times (d_u − along u) act'(from) into `to`.
template <class T, int act>
void backprop_act(int64_t d, const T *from, const T *u, const T *d_u, T along, T times, T *to) {
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> before = (load<T>(d_u + c, lanes) - load<T>(u + c, lanes) * along) * times;
        store<T>(to + c, before * act_slope<T, act>(load<T>(from + c, lanes)), lanes);
    });
}

// Compute the gradients of x and of the vectors before act and nrm.
template <class T, int R>
void backprop_vectors(const Cell &p, int64_t index, const T *row, const Token<T> &k, const TokenGradient &s,
                     Backward<T> &f) {
    constexpr int M = R ? R : MAX_REFLECTIONS;
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    T *d_row = out<T>(p.d_raw) + index * p.columns + p.vectors;
    Vec<T> dots[M] = {};
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> x = load<T>(in<T>(p.x) + index * d + c, lanes);
        const Vec<T> y = load<T>(in<T>(p.y) + index * d + c, lanes);
        const Vec<T> d_mixed = load<T>(f.d_mixed + c, lanes);
        Vec<T> dx = d_mixed, u[M];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(k.u + i * d + c, lanes);
            dx += u[i] * T(s.d_Ux[i]);
        }
        store<T>(out<T>(p.dx) + index * d + c, dx, lanes);
        for (int i = 0; i < r; ++i) {
            Vec<T> d_u = d_mixed * T(k.mix_weights[i]) + y * T(s.eta[i]) + x * T(s.d_Ux[i]);
            for (int j = 0; j < r && p.sequential; ++j)
                if (j != i) d_u += u[j] * T(s.d_gram[i][j]);
            dots[i] += d_u * u[i];
            store<T>(f.d_u + i * d + c, d_u, lanes);
        }
    });
    for (int i = 0; i < r; ++i) {
        const bool is_floored = k.length[i] < p.eps;
        const T along = is_floored ? T(0) : sum_lanes<T>(dots[i]);
        const T times = T(1 / max_length(k.length[i], p.eps));
        const auto backprop = p.act == SILU   ? backprop_act<T, SILU>
                             : p.act == RELU ? backprop_act<T, RELU>
                                             : backprop_act<T, IDENTITY>;
        const T *from = row + p.vectors + i * d;
        backprop(d, from, k.u + i * d, f.d_u + i * d, along, times, d_row + i * d);
    }
}

// Backpropagate from e and μ to the state before the token (in place of μ), to dt (added to f.ddt), A
// and C.
template <class T>
void backprop_state(const Cell &p, const Token<T> &k, T keep_t, const T *H, T *mu, Backward<T> &f, T *dA) {
    const int64_t n = p.states, d = p.channels;
    const T *A = in<T>(p.A);
    std::fill(f.lanes_C.begin(), f.lanes_C.end(), Vec<T>{});
    const auto pass = [&](auto decay_of, auto keep_log) {
        for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
            const Vec<T> e = load<T>(f.e + c, lanes), dt = load<T>(k.dt + c, lanes);
            const Vec<T> decay = load<T>(k.decay + c, lanes);
            const T *C = k.C + g * n;
            Vec<T> sum{};
            for (int64_t i = 0; i < n; ++i) {
                const int64_t index = i * d + c;
                const Vec<T> H_i = load<T>(H + index, lanes);
                const Vec<T> dH = load<T>(mu + index, lanes) + e * C[i];
                f.lanes_C[g * n + i] += e * H_i;
                sum += keep_log(index, lanes, dH * H_i, dt);
                store<T>(mu + index, dH * decay_of(index, lanes, dt, decay), lanes);
            }
            store<T>(f.d_log + c, sum, lanes);
        });
    };
    if (p.kind == MAMBA1)
        pass(
            [&](int64_t index, int64_t lanes, Vec<T> dt, Vec<T>) {
                return exponential<T>(dt * load<T>(A + index, lanes)) * keep_t;
            },
            [&](int64_t index, int64_t lanes, Vec<T> d_log, Vec<T> dt) {
                store<T>(dA + index, load<T>(dA + index, lanes) + d_log * dt, lanes);
                return d_log * load<T>(A + index, lanes);
            });
    else
        pass([](int64_t, int64_t, Vec<T>, Vec<T> decay) { return decay; },
             [](int64_t, int64_t, Vec<T> d_log, Vec<T>) { return d_log; });
    for (int64_t i = 0; i < p.groups * n; ++i) f.dC[i] = sum_lanes<T>(f.lanes_C[i]);
    for (int64_t c = 0, wide = d / p.heads; c < d; ++c) {
        if (p.kind == MAMBA1) {
            f.ddt[c] += f.d_log[c];
        } else {
            f.ddt[c] += f.d_log[c] * A[c / wide];
            dA[c / wide] += f.d_log[c] * k.dt[c];
        }
    }
}

// Backpropagate from B or C, and from B·C, to their part of the row.
template <class T>
void backprop_units(const Cell &p, T *gradient, const T *unscaled_map, const T *other, const double *d_bc,
                   const T *lengths, T *d_row) {
    for (int64_t g = 0, n = p.states; g < p.groups; ++g) {
        double dot = 0;
        for (int64_t i = g * n; i < (g + 1) * n; ++i) {
            gradient[i] += T(d_bc[g]) * other[i];
            dot += double(gradient[i]) * unscaled_map[i];
        }
        const T along = !p.bc_norm || lengths[g] < p.eps ? T(0) : T(dot);
        const T times = p.bc_norm ? T(1 / max_length(lengths[g], p.eps)) : T(1);
        for (int64_t i = g * n; i < (g + 1) * n; ++i)
            d_row[i] = (gradient[i] - along * unscaled_map[i]) * times;
    }
}

}  // namespace
