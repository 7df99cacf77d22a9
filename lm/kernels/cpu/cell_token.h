// Shared code of the forward and the backward pass of the `cell` kernel: the problem, the vectors and
// maps of a token, and the update of the state.
//
// lm/kernels/cell_arguments.py has the equations. A group of sequences goes through time together, so
// that W_y is read once for all of them. Everything else is computed per token, in an order that does
// not depend on the other sequences. `groups` and g are the groups of B and C, not those of sequences.
//
// Names: first, count: the first sequence of a group and their number; i: a sequence's place in its
// group; token_index = sequence · length + t; row: the K projections of a token; c: the first channel of
// a block; past: H C, the part of y from the states of earlier tokens.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "cell_map.h"
#include "cell_product.h"
#include "cell_root.h"
#include "vector.h"

// As in cpu_cell.py and cell_arguments.py.
enum Kind { MAMBA1, MAMBA2, RNN };
enum Norm { LAYER, RMS, NONE };
enum Act { SILU, RELU, IDENTITY };

// Arguments, packed field by field in cpu_cell.py. Sizes: b sequences, l tokens, d channels, n states,
// K columns of raw, k centroids. Arrays are contiguous, except raw, whose tokens are raw_step entries
// apart. "or null" marks arrays that may be missing. MAMBA2: dt is (b,l,heads) and A is (heads).
// RNN: dt and A, the factor on the state, are (b,l,d).
struct Cell {
    int64_t batch, length, channels, states, kind, heads, groups;
    int64_t rank, act, sequential, bc_norm, norm;
    int64_t columns, y_columns, vectors, gates, B_column, C_column;  // vectors, gates: first columns
    int64_t centroids, raw_step, checkpoint_interval, threads;
    double scale, eps, kappa, norm_eps;  // kappa: 0 if not contractive
    const void *raw, *weight;                          // (b,l,K) (y_columns,d)
    const void *x, *dt, *A;                            // (b,l,d) (b,l,d) (n,d)
    const void *keep, *gate, *D;                       // (b,l) (b,l,d) (d), each or null
    const void *norm_weight, *norm_bias;               // (d) each, or null
    const void *y0, *h0;                               // (b,d) (b,n,d), RNN: (b,d); or null
    // Centroids through which y_{t−1} + noise is read, or null: (k,d) (k) (k,d); noise (b,l,d) or null
    const void *keys, *key_bias, *values, *noise;
    void *y, *final;                                   // (b,l,d) (b,n,d), RNN: (b,d)
    uint8_t *outcome;                                  // (b,l)
    // Saved for the backward pass, or null: (b,l,K), (b,l,r), and the state (n,d) before every chunk of
    // checkpoint_interval tokens
    void *saved_rows, *roots, *checkpoints;
    void *alphas, *reads;                              // α (b,l,k) and Σ_i α_i c_i (b,l,d) of centroids c_i
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
template <class T, class Body> inline void for_each_group_block(const Cell &cell, Body body) {
    const int64_t group_width = cell.channels / cell.groups;
    for (int64_t g = 0; g < cell.groups; ++g)
        for_each_block<T>(group_width, [&](int64_t c, int64_t lanes) { body(g * group_width + c, lanes, g); });
}

template <class T> inline Vec<T> broadcast(double v) { return Vec<T>{} + T(v); }
template <class T> inline T sigmoid(T v) { return 1 / (1 + exponential<T>(broadcast<T>(-v))[0]); }

template <class T, int act> inline Vec<T> activate(Vec<T> v) {
    if constexpr (act == SILU) return v / (T(1) + exponential<T>(-v));
    if constexpr (act == RELU) return v < T(0) ? Vec<T>{} : v;  // NaN stays NaN
    return v;
}

// Number of checkpoints of a sequence.
inline int64_t count_chunks(const Cell &cell) {
    return (cell.length + cell.checkpoint_interval - 1) / cell.checkpoint_interval;
}

// Return the row of a token, in the backward pass. Without saved rows, W_y is empty and raw is the row.
template <class T> const T *find_row(const Cell &cell, int64_t token_index) {
    if (cell.saved_rows) return input<T>(cell.saved_rows) + token_index * cell.columns;
    return input<T>(cell.raw) + token_index * cell.raw_step;
}

// Return y (d) of the token before, or a row of `initial` (b,d) for a first token; null if that is null.
template <class T> const T *find_previous_y(const Cell &cell, int64_t token_index, const void *initial) {
    if (token_index % cell.length) return input<T>(cell.y) + (token_index - 1) * cell.channels;
    return initial ? input<T>(initial) + token_index / cell.length * cell.channels : nullptr;
}

// Load a block of an array; if the array is null, return `default_value` in all lanes.
template <class T>
inline Vec<T> load_or_default(const void *from, int64_t offset, int64_t lanes, double default_value) {
    return from ? load<T>(input<T>(from) + offset, lanes) : broadcast<T>(default_value);
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
template <class T> struct Token : ReflectionMap {
    T *u, *mixed, *past;                    // (r,d): unit vectors u_i; (d): x̃; (d): H C
    T *dt, *decay;                          // (d); decay only for MAMBA2 and RNN, factor keep
    T *B, *C;                               // (groups·n), normalised
    T *bc, *B_length, *C_length;            // (groups): B·C, and lengths before normalisation
    double length[MAX_REFLECTIONS];         // lengths of the vectors before nrm
    double Ux[MAX_REFLECTIONS];             // U x
    double root[MAX_REFLECTIONS];           // s
    double distance[MAX_REFLECTIONS];       // s − U x
    double mix_weights[MAX_REFLECTIONS];    // T (s − U x)

    static int64_t size(const Cell &cell) {
        const auto round_up = Arena<T>::round_up;
        return round_up(cell.rank * cell.channels) + 4 * round_up(cell.channels) +
               2 * round_up(cell.groups * cell.states) + 3 * round_up(cell.groups);
    }
    explicit Token(const Cell &cell, Arena<T> &arena) {
        u = arena.take(cell.rank * cell.channels);
        for (T **pointer : {&mixed, &past, &dt, &decay}) *pointer = arena.take(cell.channels);
        for (T **pointer : {&B, &C}) *pointer = arena.take(cell.groups * cell.states);
        for (T **pointer : {&bc, &B_length, &C_length}) *pointer = arena.take(cell.groups);
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
void compute_unit_vectors(const Cell &cell, const T *row, const T *x, Token<T> &token) {
    const int r = rank_of<R>(cell.rank);
    const int64_t d = cell.channels;
    for (int i = 0; i < r; ++i) {
        T *u = token.u + i * d;
        const auto activate_by = cell.act == SILU   ? activate_all<T, SILU>
                                 : cell.act == RELU ? activate_all<T, RELU>
                                                 : activate_all<T, IDENTITY>;
        token.length[i] = activate_by(d, row + cell.vectors + i * d, u);
        const T factor = T(1 / max_length(token.length[i], cell.eps));
        Vec<T> dot{};
        for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
            const Vec<T> v = load<T>(u + c, lanes) * factor;
            store<T>(u + c, v, lanes);
            dot += v * load<T>(x + c, lanes);
        });
        token.Ux[i] = sum_lanes<T>(dot);
        for (int j = 0; j < i && cell.sequential; ++j) {
            Vec<T> gram{};
            for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
                gram += load<T>(u + c, lanes) * load<T>(token.u + j * d + c, lanes);
            });
            token.gram[i][j] = sum_lanes<T>(gram);
        }
    }
}

// Compute the gates a, and T from them.
template <class T, int R> void compute_gates_and_map(const Cell &cell, const T *row, Token<T> &token) {
    for (int i = 0; i < rank_of<R>(cell.rank); ++i) token.gate[i] = cell.scale * sigmoid<T>(row[cell.gates + i]);
    compute_reflection_map<R>(cell.rank, cell.sequential, cell.kappa, token);
}

// Normalise the n entries of each group (or copy them without bc_norm), and compute their lengths.
template <class T> void normalize_groups(const Cell &cell, const T *from, T *to, T *lengths) {
    for (int64_t g = 0; g < cell.groups; ++g, from += cell.states, to += cell.states) {
        Vec<T> squares{};
        for_each_block<T>(cell.states, [&](int64_t i, int64_t lanes) {
            const Vec<T> v = load<T>(from + i, lanes);
            squares += v * v;
        });
        lengths[g] = std::sqrt(sum_lanes<T>(squares));
        const T factor = cell.bc_norm ? T(1 / max_length(lengths[g], cell.eps)) : T(1);
        for (int64_t i = 0; i < cell.states; ++i) to[i] = from[i] * factor;
    }
}

// Compute everything of a token that does not depend on the state: vectors, map, dt, B and C.
template <class T, int R>
void prepare_token(const Cell &cell, int64_t token_index, const T *row, Token<T> &token) {
    const int64_t d = cell.channels;
    const T *x = input<T>(cell.x) + token_index * d;
    compute_unit_vectors<T, R>(cell, row, x, token);
    compute_gates_and_map<T, R>(cell, row, token);
    const T keep_t = cell.keep ? input<T>(cell.keep)[token_index] : T(1);
    if (cell.kind == MAMBA2) {
        const int64_t head_width = d / cell.heads;
        for (int64_t h = 0; h < cell.heads; ++h) {
            const T dt = input<T>(cell.dt)[token_index * cell.heads + h];
            const T decay = exponential<T>(broadcast<T>(dt * input<T>(cell.A)[h]))[0] * keep_t;
            std::fill(token.dt + h * head_width, token.dt + (h + 1) * head_width, dt);
            std::fill(token.decay + h * head_width, token.decay + (h + 1) * head_width, decay);
        }
    } else {
        std::memcpy(token.dt, input<T>(cell.dt) + token_index * d, d * sizeof(T));
    }
    if (cell.kind == RNN) {
        for (int64_t c = 0; c < d; ++c) token.decay[c] = input<T>(cell.A)[token_index * d + c] * keep_t;
        token.bc[0] = 1;
        return;
    }
    normalize_groups<T>(cell, row + cell.B_column, token.B, token.B_length);
    normalize_groups<T>(cell, row + cell.C_column, token.C, token.C_length);
    for (int64_t g = 0; g < cell.groups; ++g) {
        Vec<T> dot{};
        for_each_block<T>(cell.states, [&](int64_t i, int64_t lanes) {
            const int64_t from = g * cell.states + i;
            dot += load<T>(token.B + from, lanes) * load<T>(token.C + from, lanes);
        });
        token.bc[g] = sum_lanes<T>(dot);
    }
}

// Compute H = decay ⊙ (h + inflow Bᵀ) and past = H C in one pass. inflow (d) and B are those of the
// previous token: its addition to the state is delayed until here. h and H are (n,d) and may be the
// same array. RNN: H = h.
template <class T>
void advance_state(const Cell &cell, const Token<T> &token, T keep_t, const T *inflow, const T *B, const T *h,
                   T *H) {
    const int64_t n = cell.states, d = cell.channels;
    const T *A = input<T>(cell.A);
    const auto pass = [&](auto compute_decay) {
        for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
            const Vec<T> in_c = load<T>(inflow + c, lanes);
            const Vec<T> dt = load<T>(token.dt + c, lanes), decay = load<T>(token.decay + c, lanes);
            const T *B_g = B + g * n, *C_g = token.C + g * n;
            Vec<T> past{};
            for (int64_t i = 0; i < n; ++i) {
                const Vec<T> previous_state = load<T>(h + i * d + c, lanes) + in_c * B_g[i];
                const Vec<T> H_i = compute_decay(i * d + c, lanes, dt, decay) * previous_state;
                store<T>(H + i * d + c, H_i, lanes);
                past += H_i * C_g[i];
            }
            store<T>(token.past + c, past, lanes);
        });
    };
    if (cell.kind == MAMBA1)
        pass([&](int64_t entry, int64_t lanes, Vec<T> dt, Vec<T>) {
            return exponential<T>(dt * load<T>(A + entry, lanes)) * keep_t;
        });
    if (cell.kind == MAMBA2) pass([](int64_t, int64_t, Vec<T>, Vec<T> decay) { return decay; });
    if (cell.kind == RNN)
        for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
            store<T>(token.past + c, load<T>(token.decay + c, lanes) * load<T>(h + c, lanes), lanes);
        });
}

// Write the state after a token, h + inflow Bᵀ, into H.
template <class T> void add_inflow(const Cell &cell, const T *inflow, const T *B, const T *h, T *H) {
    for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> in_c = load<T>(inflow + c, lanes);
        for (int64_t i = 0; i < cell.states; ++i) {
            const int64_t entry = i * cell.channels + c;
            store<T>(H + entry, load<T>(h + entry, lanes) + in_c * B[g * cell.states + i], lanes);
        }
    });
}

// Compute x̃ = x + Σ_i u_i (T (s − U x))_i.
template <class T, int R> void compute_mixed(const Cell &cell, int64_t token_index, Token<T> &token) {
    const int r = rank_of<R>(cell.rank);
    const int64_t d = cell.channels;
    for (int i = 0; i < r; ++i) {
        token.distance[i] = token.root[i] - token.Ux[i];
        token.mix_weights[i] = 0;
        for (int j = 0; j <= i; ++j) token.mix_weights[i] += token.map[i][j] * token.distance[j];
    }
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        Vec<T> mixed = load<T>(input<T>(cell.x) + token_index * d + c, lanes);
        for (int i = 0; i < r; ++i) mixed += load<T>(token.u + i * d + c, lanes) * T(token.mix_weights[i]);
        store<T>(token.mixed + c, mixed, lanes);
    });
}

// Compute v = g ⊙ (past + γ ⊙ x̃), its mean (0 unless the norm centres), and 1/√(variance + eps).
template <class T>
void compute_v(const Cell &cell, int64_t token_index, const Token<T> &token, T *v, T &mean, T &inverse) {
    const int64_t d = cell.channels;
    Vec<T> sum{}, squares{};
    for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> gamma = load<T>(token.dt + c, lanes) * token.bc[g] + load_or_default<T>(cell.D, c, lanes, 0);
        const Vec<T> ungated = load<T>(token.past + c, lanes) + gamma * load<T>(token.mixed + c, lanes);
        const Vec<T> gated = cell.gate ? ungated * load<T>(input<T>(cell.gate) + token_index * d + c,
                                                           lanes) : ungated;
        store<T>(v + c, gated, lanes);
        sum += gated;
    });
    mean = 0, inverse = 1;
    if (cell.norm == NONE) return;
    if (cell.norm == LAYER) mean = sum_lanes<T>(sum) / T(d);
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> centred = zero_padding_lanes<T>(load<T>(v + c, lanes) - mean, lanes);
        squares += centred * centred;
    });
    inverse = 1 / std::sqrt(sum_lanes<T>(squares) / T(d) + T(cell.norm_eps));
}

// Divide the sequences into groups of at most `group_size`, and call run(first, count) for each group
// in several threads.
template <class Run> void for_each_sequence_group(const Cell &cell, int64_t group_size, Run run) {
    if (cell.batch == 0) return;
    const int64_t threads = std::max<int64_t>(1, cell.threads);
    const int64_t max_count = std::min<int64_t>(group_size, (cell.batch + threads - 1) / threads);
    const int64_t groups = (cell.batch + max_count - 1) / max_count;
    const int64_t work = cell.batch * cell.length * cell.channels * (cell.y_columns + 8 * cell.states + 32);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (groups > 1 && work > (1 << 20))
    for (int64_t i = 0; i < groups; ++i) {
        const int64_t first = cell.batch * i / groups;
        run(first, cell.batch * (i + 1) / groups - first);
    }
}

// Return a matrix (rows,d) whose rows are padded to whole vectors; a copy only if d does not fill them.
template <class T>
const T *pad_rows(const Cell &cell, const void *matrix, int64_t rows, std::vector<T> &copy) {
    const int64_t d = cell.channels, width = Arena<T>::round_up(d);
    if (width == d) return input<T>(matrix);
    copy.assign(rows * width, T(0));
    for (int64_t j = 0; j < rows; ++j)
        std::memcpy(&copy[j * width], input<T>(matrix) + j * d, d * sizeof(T));
    return copy.data();
}

// The matrices that are multiplied with y_{t−1}, with rows padded to whole vectors.
template <class T> struct PaddedWeights {
    std::vector<T> copies[3];
    const T *W_y, *keys, *values;

    explicit PaddedWeights(const Cell &cell)
        : W_y(pad_rows<T>(cell, cell.weight, cell.y_columns, copies[0])),
          keys(pad_rows<T>(cell, cell.keys, cell.centroids, copies[1])),
          values(pad_rows<T>(cell, cell.values, cell.centroids, copies[2])) {}
};

// Call call(R) with the rank as a compile-time constant, or with 0 for ranks without code of their own.
template <class Call> inline void with_rank(const Cell &cell, Call call) {
    if (cell.rank == 1) return call(std::integral_constant<int, 1>{});
    if (cell.rank == 2) return call(std::integral_constant<int, 2>{});
    if (cell.rank == 4) return call(std::integral_constant<int, 4>{});
    call(std::integral_constant<int, 0>{});
}

}  // namespace
