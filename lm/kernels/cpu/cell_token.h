// Shared code of the forward and the backward pass of the `cell` kernel: the problem, the vectors and
// maps of a token, and the update of the state.
//
// lm/kernels/cell_arguments.py has the equations. A group of sequences goes through time together, so
// that W_y is read once for all of them. Everything else is computed per token, in an order that does
// not depend on the other sequences.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "cell_product.h"
#include "cell_root.h"
#include "vector.h"

// As in cpu_cell.py and cell_arguments.py.
enum Kind { MAMBA1, MAMBA2, RNN };
enum Norm { LAYER, RMS, NONE };
enum Act { SILU, RELU, IDENTITY };

// Arguments, packed field by field in cpu_cell.py. Sizes: b rows, l steps, d channels, n states,
// K columns of raw, k centroids. Arrays are contiguous, except raw, whose tokens are raw_step entries
// apart. "or null" marks arrays that may be missing. MAMBA2: dt is (b,l,heads) and A is (heads).
// RNN: dt is `fresh` and A is `decay`, (b,l,d).
struct Cell {
    int64_t rows, length, channels, states, kind, heads, groups;
    int64_t rank, act, sequential, bc_norm, norm;
    int64_t columns, y_columns, vectors, gates, B_column, C_column, centroids, raw_step, every, threads;
    double scale, eps, kappa, norm_eps;  // kappa: 0 if not contractive
    const void *raw, *weight;                          // (b,l,K) (y_columns,d)
    const void *x, *dt, *A;                            // (b,l,d) (b,l,d) (n,d)
    const void *keep, *gate, *D;                       // (b,l) or null, (b,l,d) or null, (d)
    const void *norm_weight, *norm_bias;               // (d) each, or null
    const void *y0, *h0;                               // (b,d) (b,n,d), RNN: (b,d); or null
    // Centroids through which y_{t−1} + noise is read, or null: (k,d) (k) (k,d); noise (b,l,d) or null
    const void *keys, *key_bias, *values, *noise;
    void *y, *final;                                   // (b,l,d) (b,n,d), RNN: (b,d)
    uint8_t *outcome;                                  // (b,l)
    // Saved for the backward pass, or null: (b,l,K), (b,l,r), and the state before every `every`-th
    // token.
    void *saved_rows, *roots, *checkpoints;
    void *alphas, *reads;                              // (b,l,k) (b,l,d) of the centroids
    const void *grad_y;                                // (b,l,d); this and the following: backward only
    void *adjoint;                                     // (b) or null
    void *d_raw, *d_weight, *dx, *ddt, *dA;            // shapes of the arguments; d_raw contiguous
    void *d_gate, *dD, *d_norm_weight, *d_norm_bias;   // shapes of the arguments, or null
    void *d_logits, *d_reads, *d_noise;                // (b,l,k), (b,l,d), (b,l,d) or null
};

namespace {

// Call body(c, lanes) for each vector-sized block of d channels. `lanes` is a compile-time constant
// except in the last block.
template <class T, class Body> inline void for_each_block(int64_t d, Body body) {
    int64_t c = 0;
    for (; c + LANES<T> <= d; c += LANES<T>) body(c, LANES<T>);
    if (c < d) body(c, d - c);
}

// Call body(c, lanes, g) for each vector-sized block of the channels of each group g of B and C.
template <class T, class Body> inline void for_each_group_block(const Cell &p, Body body) {
    const int64_t wide = p.channels / p.groups;
    for (int64_t g = 0; g < p.groups; ++g)
        for_each_block<T>(wide, [&](int64_t c, int64_t lanes) { body(g * wide + c, lanes, g); });
}

template <class T> inline Vec<T> broadcast(double v) { return Vec<T>{} + T(v); }
template <class T> inline T sigmoid(T v) { return 1 / (1 + exponential<T>(broadcast<T>(-v))[0]); }

template <class T, int act> inline Vec<T> activate(Vec<T> v) {
    if constexpr (act == SILU) return v / (T(1) + exponential<T>(-v));
    if constexpr (act == RELU) return v < T(0) ? Vec<T>{} : v;  // NaN stays NaN
    return v;
}

// Load a block of an array; if the array is null, return `default_value` in all lanes.
template <class T>
inline Vec<T> load_or_default(const void *from, int64_t index, int64_t lanes, double default_value) {
    return from ? load<T>(in<T>(from) + index, lanes) : broadcast<T>(default_value);
}

// Uninitialized memory, handed out in pieces that are aligned and padded to whole vectors.
template <class T> class Arena {
    std::unique_ptr<T[]> memory;
    T *next;

  public:
    static int64_t round_up(int64_t size) { return (size + LANES<T> - 1) / LANES<T> * LANES<T>; }
    explicit Arena(int64_t size) : memory(new T[size + LANES<T>]) {
        const auto address = reinterpret_cast<uintptr_t>(memory.get());
        next = reinterpret_cast<T *>((address + BYTES - 1) / BYTES * BYTES);
    }
    T *take(int64_t size) {
        T *piece = next;
        next += round_up(size);
        return piece;
    }
};

// Vectors and maps of a token, and the solution of its equation.
template <class T> struct Token {
    T *u, *mixed, *past;                    // (r,d): unit vectors u_i; (d): x̃; (d): H C
    T *dt, *decay;                          // (d); decay only for MAMBA2 and RNN, times keep
    T *B, *C;                               // (groups·n), normalised
    T *bc, *B_length, *C_length;            // (groups): B·C, and lengths before normalisation
    double length[MAX_REFLECTIONS];         // lengths of the vectors before nrm
    double gate[MAX_REFLECTIONS];           // a
    double gram[MAX_REFLECTIONS][MAX_REFLECTIONS];          // u_i·u_j for j < i
    double unscaled_map[MAX_REFLECTIONS][MAX_REFLECTIONS];  // T before the factor `shrink`
    double map[MAX_REFLECTIONS][MAX_REFLECTIONS];           // T, in M v = Σ_i u_i (T U v)_i
    double shrink;                          // κ / max(κ, Σ a)
    double Ux[MAX_REFLECTIONS];             // U x
    double mix_weights[MAX_REFLECTIONS];    // T (s − U x)
    double root[MAX_REFLECTIONS];           // s

    static int64_t size(const Cell &p) {
        const auto round_up = Arena<T>::round_up;
        return round_up(p.rank * p.channels) + 4 * round_up(p.channels) + 2 * round_up(p.groups * p.states) +
               3 * round_up(p.groups);
    }
    explicit Token(const Cell &p, Arena<T> &arena) {
        u = arena.take(p.rank * p.channels);
        for (T **pointer : {&mixed, &past, &dt, &decay}) *pointer = arena.take(p.channels);
        for (T **pointer : {&B, &C}) *pointer = arena.take(p.groups * p.states);
        for (T **pointer : {&bc, &B_length, &C_length}) *pointer = arena.take(p.groups);
    }
};

// Return max(length, eps), or NaN for NaN.
inline double max_length(double length, double eps) { return length < eps ? eps : length; }

// Write act(·) of d entries into `to`, and return its length.
template <class T, int act> double activate_all(int64_t d, const T *from, T *to) {
    Vec<T> squares{};
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> v = activate<T, act>(load<T>(from + c, lanes));
        store<T>(to + c, v, lanes);
        squares += v * v;
    });
    return std::sqrt(sum_lanes<T>(squares));
}

// Compute u_i = nrm(act(·)), U x and all u_i·u_j.
template <class T, int R>
void compute_unit_vectors(const Cell &p, const T *row, const T *x, Token<T> &k) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    for (int i = 0; i < r; ++i) {
        T *u = k.u + i * d;
        const auto activate_by = p.act == SILU   ? activate_all<T, SILU>
                                 : p.act == RELU ? activate_all<T, RELU>
                                                 : activate_all<T, IDENTITY>;
        k.length[i] = activate_by(d, row + p.vectors + i * d, u);
        const T times = T(1 / max_length(k.length[i], p.eps));
        Vec<T> dot{};
        for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
            const Vec<T> v = load<T>(u + c, lanes) * times;
            store<T>(u + c, v, lanes);
            dot += v * load<T>(x + c, lanes);
        });
        k.Ux[i] = sum_lanes<T>(dot);
        for (int j = 0; j < i && p.sequential; ++j) {
            Vec<T> gram{};
            for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
                gram += load<T>(u + c, lanes) * load<T>(k.u + j * d + c, lanes);
            });
            k.gram[i][j] = sum_lanes<T>(gram);
        }
    }
}

// Compute T from the gates: reflections in sequence (householder) or added (dplr).
template <class T, int R> void compute_reflection_map(const Cell &p, const T *row, Token<T> &k) {
    const int r = rank_of<R>(p.rank);
    double sum = 0;
    for (int i = 0; i < r; ++i) {
        k.gate[i] = p.scale * sigmoid<T>(row[p.gates + i]);
        sum += k.gate[i];
    }
    k.shrink = p.kappa > 0 && sum > p.kappa ? p.kappa / sum : 1;
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < r; ++j) {
            double entry = i == j;
            for (int l = j; l < i && p.sequential; ++l) entry -= k.gram[i][l] * k.unscaled_map[l][j];
            k.unscaled_map[i][j] = j > i ? 0 : k.gate[i] * entry;
            k.map[i][j] = k.shrink * k.unscaled_map[i][j];
        }
}

// Normalise the n entries of each group (or copy them without bc_norm), and compute their lengths.
template <class T> void normalize_groups(const Cell &p, const T *from, T *to, T *lengths) {
    for (int64_t g = 0; g < p.groups; ++g, from += p.states, to += p.states) {
        Vec<T> squares{};
        for_each_block<T>(p.states, [&](int64_t k, int64_t lanes) {
            const Vec<T> v = load<T>(from + k, lanes);
            squares += v * v;
        });
        lengths[g] = std::sqrt(sum_lanes<T>(squares));
        const T times = p.bc_norm ? T(1 / max_length(lengths[g], p.eps)) : T(1);
        for (int64_t k = 0; k < p.states; ++k) to[k] = from[k] * times;
    }
}

// Compute everything of a token that does not depend on the state: vectors, map, dt, B and C.
// index: the token's place among all tokens.
template <class T, int R>
void prepare_token(const Cell &p, int64_t index, const T *row, Token<T> &k) {
    const int64_t d = p.channels;
    const T *x = in<T>(p.x) + index * d;
    compute_unit_vectors<T, R>(p, row, x, k);
    compute_reflection_map<T, R>(p, row, k);
    const T keep_t = p.keep ? in<T>(p.keep)[index] : T(1);
    if (p.kind == MAMBA2) {
        const int64_t wide = d / p.heads;
        for (int64_t h = 0; h < p.heads; ++h) {
            const T dt = in<T>(p.dt)[index * p.heads + h];
            const T decay = exponential<T>(broadcast<T>(dt * in<T>(p.A)[h]))[0] * keep_t;
            std::fill(k.dt + h * wide, k.dt + (h + 1) * wide, dt);
            std::fill(k.decay + h * wide, k.decay + (h + 1) * wide, decay);
        }
    } else {
        std::memcpy(k.dt, in<T>(p.dt) + index * d, d * sizeof(T));
    }
    if (p.kind == RNN) {
        for (int64_t c = 0; c < d; ++c) k.decay[c] = in<T>(p.A)[index * d + c] * keep_t;
        k.bc[0] = 1;
        return;
    }
    normalize_groups<T>(p, row + p.B_column, k.B, k.B_length);
    normalize_groups<T>(p, row + p.C_column, k.C, k.C_length);
    for (int64_t g = 0; g < p.groups; ++g) {
        Vec<T> dot{};
        for_each_block<T>(p.states, [&](int64_t i, int64_t lanes) {
            const int64_t from = g * p.states + i;
            dot += load<T>(k.B + from, lanes) * load<T>(k.C + from, lanes);
        });
        k.bc[g] = sum_lanes<T>(dot);
    }
}

// Compute H = decay ⊙ (h + inflow Bᵀ) and past = H C in one pass. inflow (d) and B are those of the
// previous token: its addition to the state is delayed until here. h and H are (n,d) and may be the
// same array. RNN: H = h.
template <class T>
void advance_state(const Cell &p, const Token<T> &k, T keep_t, const T *inflow, const T *B, const T *h, T *H) {
    const int64_t n = p.states, d = p.channels;
    const T *A = in<T>(p.A);
    const auto pass = [&](auto decay_of) {
        for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
            const Vec<T> in_c = load<T>(inflow + c, lanes);
            const Vec<T> dt = load<T>(k.dt + c, lanes), decay = load<T>(k.decay + c, lanes);
            const T *B_g = B + g * n, *C_g = k.C + g * n;
            Vec<T> past{};
            for (int64_t i = 0; i < n; ++i) {
                const Vec<T> ended = load<T>(h + i * d + c, lanes) + in_c * B_g[i];
                const Vec<T> H_i = decay_of(i * d + c, lanes, dt, decay) * ended;
                store<T>(H + i * d + c, H_i, lanes);
                past += H_i * C_g[i];
            }
            store<T>(k.past + c, past, lanes);
        });
    };
    if (p.kind == MAMBA1)
        pass([&](int64_t index, int64_t lanes, Vec<T> dt, Vec<T>) {
            return exponential<T>(dt * load<T>(A + index, lanes)) * keep_t;
        });
    if (p.kind == MAMBA2) pass([](int64_t, int64_t, Vec<T>, Vec<T> decay) { return decay; });
    if (p.kind == RNN)
        for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
            store<T>(k.past + c, load<T>(k.decay + c, lanes) * load<T>(h + c, lanes), lanes);
        });
}

// Write the state after a token, h + inflow Bᵀ, into H.
template <class T> void add_inflow(const Cell &p, const T *inflow, const T *B, const T *h, T *H) {
    for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> in_c = load<T>(inflow + c, lanes);
        for (int64_t i = 0; i < p.states; ++i) {
            const int64_t index = i * p.channels + c;
            store<T>(H + index, load<T>(h + index, lanes) + in_c * B[g * p.states + i], lanes);
        }
    });
}

// Compute x̃ = x + Σ_i u_i (T (s − U x))_i.
template <class T, int R> void compute_mixed(const Cell &p, int64_t index, Token<T> &k) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    for (int i = 0; i < r; ++i) {
        k.mix_weights[i] = 0;
        for (int j = 0; j <= i; ++j) k.mix_weights[i] += k.map[i][j] * (k.root[j] - k.Ux[j]);
    }
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        Vec<T> mixed = load<T>(in<T>(p.x) + index * d + c, lanes);
        for (int i = 0; i < r; ++i) mixed += load<T>(k.u + i * d + c, lanes) * T(k.mix_weights[i]);
        store<T>(k.mixed + c, mixed, lanes);
    });
}

// Compute v = g ⊙ (past + γ ⊙ x̃), its mean (0 unless the norm centres), and 1/√(variance + eps).
template <class T>
void compute_v(const Cell &p, int64_t index, const Token<T> &k, T *v, T &mean, T &inverse) {
    const int64_t d = p.channels;
    Vec<T> sum{}, squares{};
    for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> gamma = load<T>(k.dt + c, lanes) * k.bc[g] + load_or_default<T>(p.D, c, lanes, 0);
        const Vec<T> round_up = load<T>(k.past + c, lanes) + gamma * load<T>(k.mixed + c, lanes);
        const Vec<T> gated = p.gate ? round_up * load<T>(in<T>(p.gate) + index * d + c, lanes) : round_up;
        store<T>(v + c, gated, lanes);
        sum += gated;
    });
    mean = 0, inverse = 1;
    if (p.norm == NONE) return;
    if (p.norm == LAYER) mean = sum_lanes<T>(sum) / T(d);
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> centred = zero_padding_lanes<T>(load<T>(v + c, lanes) - mean, lanes);
        squares += centred * centred;
    });
    inverse = 1 / std::sqrt(sum_lanes<T>(squares) / T(d) + T(p.norm_eps));
}

// Divide the sequences into groups of at most `group_size`, and call run(first, count) for each group
// in several threads.
template <class Run> void for_each_group(const Cell &p, int64_t group_size, Run run) {
    if (p.rows == 0) return;
    const int64_t threads = std::max<int64_t>(1, p.threads);
    const int64_t max_count = std::min<int64_t>(group_size, (p.rows + threads - 1) / threads);
    const int64_t groups = (p.rows + max_count - 1) / max_count;
    const int64_t work = p.rows * p.length * p.channels * (p.y_columns + 8 * p.states + 32);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (groups > 1 && work > (1 << 20))
    for (int64_t i = 0; i < groups; ++i) {
        const int64_t first = p.rows * i / groups;
        run(first, p.rows * (i + 1) / groups - first);
    }
}

// Return a matrix (rows,d) whose rows are padded to whole vectors; a copy only if d does not fill them.
template <class T>
const T *pad_rows(const Cell &p, const void *matrix, int64_t rows, std::vector<T> &copy) {
    const int64_t d = p.channels, width = Arena<T>::round_up(d);
    if (width == d) return in<T>(matrix);
    copy.assign(rows * width, T(0));
    for (int64_t j = 0; j < rows; ++j)
        std::memcpy(&copy[j * width], in<T>(matrix) + j * d, d * sizeof(T));
    return copy.data();
}

// The matrices that are multiplied with y_{t−1}, with rows padded to whole vectors.
template <class T> struct Maps {
    std::vector<T> copies[3];
    const T *W, *keys, *values;

    explicit Maps(const Cell &p)
        : W(pad_rows<T>(p, p.weight, p.y_columns, copies[0])),
          keys(pad_rows<T>(p, p.keys, p.centroids, copies[1])),
          values(pad_rows<T>(p, p.values, p.centroids, copies[2])) {}
};

// Call call(R) with the rank as a compile-time constant, or 0 if there is no code for that rank.
template <class Call> inline void with_rank(const Cell &p, Call call) {
    if (p.rank == 1) return call(std::integral_constant<int, 1>{});
    if (p.rank == 2) return call(std::integral_constant<int, 2>{});
    if (p.rank == 4) return call(std::integral_constant<int, 4>{});
    call(std::integral_constant<int, 0>{});
}

}  // namespace
