// One token of the exact token's gradient: from that of y_t and of h_t to those of all it was made of.
//
// With λ the gradient of y_t and μ that of h_t, θ = g γ, e the gradient of past + γ ⊙ x̃, and z(λ) that
// of U x̃ through y (all of them linear in λ):
//   ḡ = Tᵀ (z(λ) + U (dt ⊙ μ B)) is what s = root receives;  η = (I − φ′)⁻ᵀ ḡ,  φ′ᵀ_i = Tᵀ z(u_i)
// and from then on s is a constant and λ + Uᵀ η the gradient of y_t.

#pragma once

#include "cell_token.h"

namespace {

// Sums over a sequence's tokens, each apart, so that no result depends on the number of threads.
template <class T> struct Sums {
    int64_t A, d;  // sizes
    std::vector<T> dA, dD, d_weight, d_bias;
    explicit Sums(const Cell &p)
        : A(p.kind == MAMBA1 ? p.states * p.channels : p.kind == MAMBA2 ? p.heads : 0),
          d(p.channels), dA(p.rows * A), dD(p.rows * d), d_weight(dD.size()), d_bias(dD.size()) {}
};

// What a group of sequences carries back, and one chunk of it forwards again.
template <class T> struct Backward {
    int64_t width, state;
    std::vector<Token<T>> tokens;        // (sequence, step)
    T *H;                                // (sequence, step, n, d): states after their decay
    T *mu, *carried;                     // (sequence, n, d), (sequence, width)
    T *lambda, *v, *e, *d_mixed, *mu_B, *ddt, *d_log, *inflow, *d_u;  // (d) each, of one token
    T *dB, *dC, *zeros;                  // (groups·n), zeros (d)
    std::vector<Vec<T>> lanes_B, lanes_C;
    std::vector<double> largest;         // of each sequence: of ‖λ‖ so far
    Arena<T> arena;

    static int64_t size(const Cell &p, int64_t count) {
        const auto whole = Arena<T>::whole;
        const int64_t d = whole(p.channels), state = whole(p.states * p.channels);
        const int64_t step = Token<T>::size(p) + (p.kind == RNN ? 0 : state);
        return count * (p.every * step + state + d) + (p.rank + 9) * d +
               3 * whole(std::max(p.channels, p.groups * p.states));
    }
    Backward(const Cell &p, int64_t count)
        : width(Arena<T>::whole(p.channels)), state(Arena<T>::whole(p.states * p.channels)),
          lanes_B(p.groups * p.states), lanes_C(lanes_B.size()), largest(count),
          arena(size(p, count)) {
        for (int64_t i = 0; i < count * p.every; ++i) tokens.emplace_back(p, arena);
        H = p.kind == RNN ? nullptr : arena.take(count * p.every * state);
        mu = arena.take(count * state);
        carried = arena.take(count * width);
        for (T **of : {&lambda, &v, &e, &d_mixed, &mu_B, &ddt, &d_log, &inflow})
            *of = arena.take(p.channels);
        d_u = arena.take(p.rank * p.channels);
        for (T **of : {&dB, &dC}) *of = arena.take(p.groups * p.states);
        zeros = arena.take(std::max(p.channels, p.groups * p.states));
        std::fill(mu, mu + count * state, T(0));
        std::fill(carried, carried + count * width, T(0));
        std::fill(zeros, zeros + std::max(p.channels, p.groups * p.states), T(0));
    }
};

// Small vectors and matrices of one token.
struct Small {
    double mean_lambda, along_lambda;          // mean of wλ where centred, mean of wλ v̂
    double mean_u[MOST], along_u[MOST];        // the same of u_i
    double slope[MOST][MOST], received[MOST];  // φ′, ḡ
    double eta[MOST];                          // η
    double d_moves[MOST], d_seen[MOST];        // of T (s − U x), of U x
    double d_gate[MOST], d_gram[MOST][MOST];   // d_gram symmetric
};

// The chunk's tokens again: vectors, x̃ of the roots that were found, states after their decay.
template <class T, int R>
void again(const Cell &p, int64_t row, int64_t first, int64_t steps, Token<T> *tokens, T *H,
           Backward<T> &f) {
    const int64_t d = p.channels, n = p.states, chunks = (p.length + p.every - 1) / p.every;
    const T *before = f.zeros, *h = nullptr;
    if (p.kind != RNN) h = in<T>(p.checkpoints) + (row * chunks + first / p.every) * n * d;
    for (int64_t t = 0; t < steps; ++t) {
        const int64_t at = row * p.length + first + t;
        Token<T> &k = tokens[t];
        const T *rows = p.kept_rows ? in<T>(p.kept_rows) + at * p.columns
                                    : in<T>(p.raw) + at * p.raw_step;
        prepare<T, R>(p, at, rows, k);
        if (p.kind == RNN) {
            h = first + t ? in<T>(p.y) + (at - 1) * d : p.h0 ? in<T>(p.h0) + row * d : f.zeros;
            advance<T>(p, k, T(1), f.zeros, f.zeros, h, nullptr);
        } else {
            const T kept = p.keep ? in<T>(p.keep)[at] : T(1);
            advance<T>(p, k, kept, t ? f.inflow : f.zeros, before, h, H + t * f.state);
            h = H + t * f.state;
            before = k.B;
        }
        for (int64_t i = 0; i < p.rank; ++i) k.root[i] = in<T>(p.roots)[at * p.rank + i];
        mix<T, R>(p, at, k);
        blocks<T>(d, [&](int64_t c, int64_t lanes) {
            store<T>(f.inflow + c, load<T>(k.dt + c, lanes) * load<T>(k.mixed + c, lanes), lanes);
        });
    }
}

// What the state after a token gives: μ B (d), and Σ_c μ dt x̃, B's gradient.
template <class T>
void drain(const Cell &p, const Token<T> &k, const T *mu, Backward<T> &f) {
    std::fill(f.lanes_B.begin(), f.lanes_B.end(), Vec<T>{});
    blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> inflow = load<T>(k.dt + c, lanes) * load<T>(k.mixed + c, lanes);
        Vec<T> sum{};
        for (int64_t i = 0; i < p.states; ++i) {
            const Vec<T> mu_i = load<T>(mu + i * p.channels + c, lanes);
            sum += mu_i * k.B[g * p.states + i];
            f.lanes_B[g * p.states + i] += mu_i * inflow;
        }
        store<T>(f.mu_B + c, sum, lanes);
    });
    for (int64_t i = 0; i < p.groups * p.states; ++i) f.dB[i] = across<T>(f.lanes_B[i]);
}

// λ = ∂y + carried into f.lambda, with RNN's μ; keeps the largest ‖∂y + carried‖.
template <class T>
void gather_lambda(const Cell &p, int64_t at, int64_t i, Backward<T> &f) {
    Vec<T> squares{};
    blocks<T>(p.channels, [&](int64_t c, int64_t lanes) {
        Vec<T> lambda = load<T>(in<T>(p.grad_y) + at * p.channels + c, lanes);
        lambda += load<T>(f.carried + i * f.width + c, lanes);
        squares += lambda * lambda;
        if (p.kind == RNN) lambda += load<T>(f.mu + i * f.state + c, lanes);
        store<T>(f.lambda + c, lambda, lanes);
    });
    const double size = std::sqrt(double(across<T>(squares)));
    if (!(size <= f.largest[i])) f.largest[i] = size;
}

// v̂ in place of v, and the sums of one pass: φ′, ḡ, what the norm takes off.
template <class T, int R>
void reduce(const Cell &p, int64_t at, const Token<T> &k, T mean, T inverse, Backward<T> &f,
            Small &s) {
    constexpr int M = R ? R : MOST;
    const int r = rank_of<R>(p.rank);
    Vec<T> lambda1{}, lambda2{}, u1[M] = {}, u2[M] = {};
    Vec<T> theta1[M] = {}, theta2[M] = {}, theta_lambda[M] = {}, theta_u[M][M] = {}, state[M] = {};
    blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> normed = first_lanes<T>((load<T>(f.v + c, lanes) - mean) * inverse, lanes);
        store<T>(f.v + c, normed, lanes);
        const Vec<T> weight = load_or<T>(p.norm_weight, c, lanes, 1);
        const Vec<T> lambda = load<T>(f.lambda + c, lanes) * weight;
        const Vec<T> dt = load<T>(k.dt + c, lanes);
        const Vec<T> gate = p.gate ? load<T>(in<T>(p.gate) + at * p.channels + c, lanes)
                                   : all_of<T>(1);
        const Vec<T> theta = (dt * k.bc[g] + load_or<T>(p.D, c, lanes, 0)) * gate;
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
    s.mean_lambda = across<T>(lambda1) * centred;
    s.along_lambda = across<T>(lambda2) * scaled;
    double z[MOST], z_u[MOST][MOST];
    for (int i = 0; i < r; ++i) {
        s.mean_u[i] = across<T>(u1[i]) * centred;
        s.along_u[i] = across<T>(u2[i]) * scaled;
    }
    for (int l = 0; l < r; ++l) {
        const double one = across<T>(theta1[l]), along = across<T>(theta2[l]);
        z[l] = across<T>(theta_lambda[l]) - s.mean_lambda * one - s.along_lambda * along;
        z[l] = inverse * z[l] + across<T>(state[l]);
        for (int i = 0; i < r; ++i) {
            z_u[l][i] = across<T>(theta_u[l][i]) - s.mean_u[i] * one - s.along_u[i] * along;
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

// η = (I − φ′)⁻ᵀ ḡ, no longer than MOST_GAIN ‖ḡ‖; ḡ where there is no root. Near a fold the true one is without bound.
template <int R> void attach(const Cell &p, bool failed, Small &s) {
    const int r = rank_of<R>(p.rank);
    double M[MOST][MOST], before = 0, after = 0;
    for (int i = 0; i < r; ++i) {
        s.eta[i] = s.received[i];
        before += s.received[i] * s.received[i];
        for (int j = 0; j < r; ++j) M[i][j] = (i == j) - s.slope[j][i];
    }
    if (failed) return;
    eliminate<R>(M, s.eta, r);
    for (int i = 0; i < r; ++i) after += s.eta[i] * s.eta[i];
    const bool finite = after <= std::numeric_limits<double>::max();
    if (finite && after <= MOST_GAIN * MOST_GAIN * before) return;
    // Of a singular matrix no direction is known: ḡ's own.
    const double times = finite ? MOST_GAIN * std::sqrt(before / after) : MOST_GAIN;
    for (int i = 0; i < r; ++i) s.eta[i] = times * (finite ? s.eta[i] : s.received[i]);
}

// Given η, all gradients of one token that are sums over no states: of the norm, the gate, D, past
// (e), x̃ and, but for the state's part, of dt. d_bc: B·C's, of each group.
template <class T, int R>
void through_y(const Cell &p, int64_t at, int64_t row, const Token<T> &k, T inverse, Backward<T> &f,
               Small &s, Sums<T> &sums, double *d_bc) {
    constexpr int M = R ? R : MOST;
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    double mean = s.mean_lambda, along = s.along_lambda;
    for (int i = 0; i < r; ++i) {
        mean += s.eta[i] * s.mean_u[i];
        along += s.eta[i] * s.along_u[i];
    }
    T *d_weight = &sums.d_weight[row * d], *d_bias = &sums.d_bias[row * d], *dD = &sums.dD[row * d];
    Vec<T> d_moves[M] = {}, products{};
    int64_t group = 0;
    const auto end_group = [&] { d_bc[group] = across<T>(products); };
    blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        if (g != group) {
            end_group();
            products = Vec<T>{};
            group = g;
        }
        const Vec<T> normed = load<T>(f.v + c, lanes), dt = load<T>(k.dt + c, lanes);
        const Vec<T> mixed = load<T>(k.mixed + c, lanes), mu_B = load<T>(f.mu_B + c, lanes);
        const Vec<T> gamma = dt * k.bc[g] + load_or<T>(p.D, c, lanes, 0);
        Vec<T> lambda = load<T>(f.lambda + c, lanes);
        for (int i = 0; i < r; ++i) lambda += load<T>(k.u + i * d + c, lanes) * T(s.eta[i]);
        if (p.d_norm_weight) store<T>(d_weight + c, load<T>(d_weight + c, lanes) + lambda * normed, lanes);
        if (p.d_norm_bias) store<T>(d_bias + c, load<T>(d_bias + c, lanes) + lambda, lanes);
        Vec<T> e = lambda * load_or<T>(p.norm_weight, c, lanes, 1) - T(mean) - normed * T(along);
        e *= inverse;
        if (p.gate) {
            const Vec<T> whole = load<T>(k.past + c, lanes) + gamma * mixed;
            store<T>(out<T>(p.d_gate) + at * d + c, e * whole, lanes);
            e *= load<T>(in<T>(p.gate) + at * d + c, lanes);
        }
        e = first_lanes<T>(e, lanes);
        const Vec<T> d_gamma = e * mixed, d_mixed = gamma * e + dt * mu_B;
        store<T>(f.e + c, e, lanes);
        store<T>(f.d_mixed + c, d_mixed, lanes);
        store<T>(f.ddt + c, d_gamma * k.bc[g] + mixed * mu_B, lanes);
        if (p.dD) store<T>(dD + c, load<T>(dD + c, lanes) + d_gamma, lanes);
        products += d_gamma * dt;
        for (int i = 0; i < r; ++i) d_moves[i] += load<T>(k.u + i * d + c, lanes) * d_mixed;
    });
    end_group();
    for (int i = 0; i < r; ++i) s.d_moves[i] = across<T>(d_moves[i]);
}

// From d(T (s − U x)) to U x, the gates and the u_i·u_j.
template <class T, int R> void through_map(const Cell &p, const Token<T> &k, Small &s) {
    const int r = rank_of<R>(p.rank);
    double d_own[MOST][MOST], d_shrink = 0, sum = 0;
    for (int j = 0; j < r; ++j) {
        s.d_seen[j] = s.d_gate[j] = 0;
        sum += k.gate[j];
        for (int l = j; l < r; ++l) {
            const double d_map = s.d_moves[l] * (k.root[j] - k.seen[j]);
            s.d_seen[j] -= k.map[l][j] * s.d_moves[l];
            d_shrink += d_map * k.own[l][j];
            d_own[l][j] = d_map * k.shrink;
        }
        for (int l = 0; l < r; ++l) s.d_gram[j][l] = 0;
    }
    for (int i = r - 1; i >= 0; --i)
        for (int j = 0; j <= i; ++j) {
            double entry = i == j;
            for (int l = j; l < i && p.sequential; ++l) {
                entry -= k.gram[i][l] * k.own[l][j];
                s.d_gram[i][l] -= d_own[i][j] * k.gate[i] * k.own[l][j];
                d_own[l][j] -= d_own[i][j] * k.gate[i] * k.gram[i][l];
            }
            s.d_gate[i] += d_own[i][j] * entry;
        }
    const bool shrunk = p.kappa > 0 && sum > p.kappa;
    for (int i = 0; i < r; ++i) {
        if (shrunk) s.d_gate[i] -= d_shrink * k.shrink / sum;
        s.d_gate[i] *= k.gate[i] * (1 - k.gate[i] / p.scale);  // before the sigmoid
        for (int l = 0; l < i; ++l) s.d_gram[l][i] = s.d_gram[i][l];
    }
}

// act'(v).
template <class T, int act> inline Vec<T> slope_of(Vec<T> v) {
    if constexpr (act == SILU) {
        const Vec<T> gate = T(1) / (T(1) + exponential<T>(-v));
        return gate * (T(1) + v * (T(1) - gate));
    }
    if constexpr (act == RELU) return v > T(0) ? all_of<T>(1) : Vec<T>{};
    return all_of<T>(1);
}

// Through u = nrm(act(from)): (d_u − along u) times act'(from), into `to`.
template <class T, int act>
void through_act(int64_t d, const T *from, const T *u, const T *d_u, T along, T times, T *to) {
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> before = (load<T>(d_u + c, lanes) - load<T>(u + c, lanes) * along) * times;
        store<T>(to + c, before * slope_of<T, act>(load<T>(from + c, lanes)), lanes);
    });
}

// The gradients of x and of the vectors before act and nrm.
template <class T, int R>
void through_vectors(const Cell &p, int64_t at, const T *row, const Token<T> &k, const Small &s,
                     Backward<T> &f) {
    constexpr int M = R ? R : MOST;
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    T *d_row = out<T>(p.d_raw) + at * p.columns + p.vectors;
    Vec<T> dots[M] = {};
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> x = load<T>(in<T>(p.x) + at * d + c, lanes);
        const Vec<T> y = load<T>(in<T>(p.y) + at * d + c, lanes);
        const Vec<T> d_mixed = load<T>(f.d_mixed + c, lanes);
        Vec<T> dx = d_mixed, u[M];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(k.u + i * d + c, lanes);
            dx += u[i] * T(s.d_seen[i]);
        }
        store<T>(out<T>(p.dx) + at * d + c, dx, lanes);
        for (int i = 0; i < r; ++i) {
            Vec<T> d_u = d_mixed * T(k.moves[i]) + y * T(s.eta[i]) + x * T(s.d_seen[i]);
            for (int j = 0; j < r && p.sequential; ++j)
                if (j != i) d_u += u[j] * T(s.d_gram[i][j]);
            dots[i] += d_u * u[i];
            store<T>(f.d_u + i * d + c, d_u, lanes);
        }
    });
    for (int i = 0; i < r; ++i) {
        const bool floored = k.length[i] < p.eps;
        const T along = floored ? T(0) : across<T>(dots[i]);
        const T times = T(1 / at_least(k.length[i], p.eps));
        const auto through = p.act == SILU   ? through_act<T, SILU>
                             : p.act == RELU ? through_act<T, RELU>
                                             : through_act<T, IDENTITY>;
        const T *from = row + p.vectors + i * d;
        through(d, from, k.u + i * d, f.d_u + i * d, along, times, d_row + i * d);
    }
}

// From e and μ, the gradient of the state after the token, to that before it, in place; to dt (added
// to f.ddt), A and C.
template <class T>
void through_state(const Cell &p, const Token<T> &k, T kept, const T *H, T *mu, Backward<T> &f, T *dA) {
    const int64_t n = p.states, d = p.channels;
    const T *A = in<T>(p.A);
    std::fill(f.lanes_C.begin(), f.lanes_C.end(), Vec<T>{});
    const auto pass = [&](auto decay_of, auto keep_log) {
        blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
            const Vec<T> e = load<T>(f.e + c, lanes), dt = load<T>(k.dt + c, lanes);
            const Vec<T> decay = load<T>(k.decay + c, lanes);
            const T *C = k.C + g * n;
            Vec<T> sum{};
            for (int64_t i = 0; i < n; ++i) {
                const int64_t at = i * d + c;
                const Vec<T> H_i = load<T>(H + at, lanes);
                const Vec<T> dH = load<T>(mu + at, lanes) + e * C[i];
                f.lanes_C[g * n + i] += e * H_i;
                sum += keep_log(at, lanes, dH * H_i, dt);
                store<T>(mu + at, dH * decay_of(at, lanes, dt, decay), lanes);
            }
            store<T>(f.d_log + c, sum, lanes);
        });
    };
    if (p.kind == MAMBA1)
        pass(
            [&](int64_t at, int64_t lanes, Vec<T> dt, Vec<T>) {
                return exponential<T>(dt * load<T>(A + at, lanes)) * kept;
            },
            [&](int64_t at, int64_t lanes, Vec<T> d_log, Vec<T> dt) {
                store<T>(dA + at, load<T>(dA + at, lanes) + d_log * dt, lanes);
                return d_log * load<T>(A + at, lanes);
            });
    else
        pass([](int64_t, int64_t, Vec<T>, Vec<T> decay) { return decay; },
             [](int64_t, int64_t, Vec<T> d_log, Vec<T>) { return d_log; });
    for (int64_t i = 0; i < p.groups * n; ++i) f.dC[i] = across<T>(f.lanes_C[i]);
    for (int64_t c = 0, wide = d / p.heads; c < d; ++c) {
        if (p.kind == MAMBA1) {
            f.ddt[c] += f.d_log[c];
        } else {
            f.ddt[c] += f.d_log[c] * A[c / wide];
            dA[c / wide] += f.d_log[c] * k.dt[c];
        }
    }
}

// From the gradient of B or C, with that of B·C, to its part of the row.
template <class T>
void through_units(const Cell &p, T *gradient, const T *own, const T *other, const double *d_bc,
                   const T *lengths, T *d_row) {
    for (int64_t g = 0, n = p.states; g < p.groups; ++g) {
        double dot = 0;
        for (int64_t i = g * n; i < (g + 1) * n; ++i) {
            gradient[i] += T(d_bc[g]) * other[i];
            dot += double(gradient[i]) * own[i];
        }
        const T along = !p.bc_norm || lengths[g] < p.eps ? T(0) : T(dot);
        const T times = p.bc_norm ? T(1 / at_least(lengths[g], p.eps)) : T(1);
        for (int64_t i = g * n; i < (g + 1) * n; ++i)
            d_row[i] = (gradient[i] - along * own[i]) * times;
    }
}

}  // namespace
