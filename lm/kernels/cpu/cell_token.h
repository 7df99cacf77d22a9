// What the exact token's two directions share: the problem, a token's vectors and maps, the state.
//
// A layer's token is an explicit function of what was before it (lm/kernels/cpu/cpu_cell.py says which).
// A group of sequences goes through time together, so that the weight of sh(y) is read once for all;
// everything else of a token is computed by itself, in an order that nothing around it changes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "cell_product.h"
#include "cell_root.h"
#include "vector.h"

enum Kind { MAMBA1, MAMBA2, RNN };     // as in cpu_cell.py, and so those below
enum Norm { LAYER, RMS, NONE };
enum Act { SILU, RELU, IDENTITY };

// Packed field by field in cpu_cell.py. Arrays are contiguous but for raw, whose tokens lie
// raw_step apart; "or null" marks those that may be missing. b rows, l steps, d channels, n states,
// K columns of raw. MAMBA2: dt (b,l,heads) and A (heads). RNN: dt is `fresh`, A is `decay` (b,l,d).
struct Cell {
    int64_t rows, length, channels, states, kind, heads, groups;
    int64_t rank, act, sequential, bc_norm, norm;
    int64_t columns, reading, vectors, gates, B_at, C_at, centroids, raw_step, every, threads;
    double scale, eps, kappa, norm_eps;  // kappa: 0 for none
    const void *raw, *weight;                          // (b,l,K) (reading,d)
    const void *x, *dt, *A;                            // (b,l,d) (b,l,d) (n,d)
    const void *keep, *gate, *D;                       // (b,l) or null, (b,l,d) or null, (d)
    const void *norm_weight, *norm_bias;               // (d) each, or null
    const void *y0, *h0;                               // (b,d) (b,n,d), RNN: (b,d); or null
    // k centroids, through which y_{t−1} + noise is read, or null: (k,d) (k) (k,d), (b,l,d) or null
    const void *keys, *key_bias, *values, *noise;
    void *y, *final;                                   // (b,l,d) (b,n,d), RNN: (b,d)
    uint8_t *outcome;                                  // (b,l)
    // For the way back, or null: (b,l,K), (b,l,r), and the state entering every `every`-th token.
    void *kept_rows, *roots, *checkpoints;
    void *alphas, *reads;                              // (b,l,k) (b,l,d) of the centroids
    const void *grad_y;                                // (b,l,d); from here on backward only
    void *adjoint;                                     // (b) or null
    void *d_raw, *d_weight, *dx, *ddt, *dA;            // like theirs, raw's contiguous
    void *d_gate, *dD, *d_norm_weight, *d_norm_bias;   // like theirs, null where those are
    void *d_logits, *d_reads, *d_noise;                // (b,l,k), (b,l,d), (b,l,d) or null
};

namespace {

// body(c, lanes) for all blocks of d channels; in all but the last `lanes` is a constant.
template <class T, class Body> inline void blocks(int64_t d, Body body) {
    int64_t c = 0;
    for (; c + LANES<T> <= d; c += LANES<T>) body(c, LANES<T>);
    if (c < d) body(c, d - c);
}

// body(c, lanes, g) for all blocks of the channels of each group of B and C.
template <class T, class Body> inline void blocks_of_groups(const Cell &p, Body body) {
    const int64_t wide = p.channels / p.groups;
    for (int64_t g = 0; g < p.groups; ++g)
        blocks<T>(wide, [&](int64_t c, int64_t lanes) { body(g * wide + c, lanes, g); });
}

template <class T> inline Vec<T> all_of(double v) { return Vec<T>{} + T(v); }
template <class T> inline T sigmoid(T v) { return 1 / (1 + exponential<T>(all_of<T>(-v))[0]); }

template <class T, int act> inline Vec<T> activate(Vec<T> v) {
    if constexpr (act == SILU) return v / (T(1) + exponential<T>(-v));
    if constexpr (act == RELU) return v < T(0) ? Vec<T>{} : v;  // NaN stays NaN
    return v;
}

// A block of an array that may be missing: then `missing` in all lanes.
template <class T>
inline Vec<T> load_or(const void *from, int64_t at, int64_t lanes, double missing) {
    return from ? load<T>(in<T>(from) + at, lanes) : all_of<T>(missing);
}

// Memory in pieces that begin where a vector may, with room for whole vectors; not set.
template <class T> class Arena {
    std::unique_ptr<T[]> memory;
    T *next;

  public:
    static int64_t whole(int64_t size) { return (size + LANES<T> - 1) / LANES<T> * LANES<T>; }
    explicit Arena(int64_t size) : memory(new T[size + LANES<T>]) {
        const auto at = reinterpret_cast<uintptr_t>(memory.get());
        next = reinterpret_cast<T *>((at + BYTES - 1) / BYTES * BYTES);
    }
    T *take(int64_t size) {
        T *piece = next;
        next += whole(size);
        return piece;
    }
};

// What a token computes before its equation, and its root.
template <class T> struct Token {
    T *u, *mixed, *past;       // (r,d): unit vectors; (d): x̃; (d): (H C)
    T *dt, *decay;             // (d); decay only in MAMBA2, with keep
    T *B, *C;                  // (groups·n), normalised
    T *bc, *B_length, *C_length;  // (groups)
    double length[MOST], gate[MOST];           // of the vectors before nrm, a
    double gram[MOST][MOST], own[MOST][MOST];  // u_i·u_j for j < i; T before `shrink`
    double map[MOST][MOST], shrink;            // T: M v = Σ_i u_i (T U v)_i
    double seen[MOST], moves[MOST], root[MOST];  // U x, T (s − U x), s

    static int64_t size(const Cell &p) {
        const auto whole = Arena<T>::whole;
        return whole(p.rank * p.channels) + 4 * whole(p.channels) + 2 * whole(p.groups * p.states) +
               3 * whole(p.groups);
    }
    explicit Token(const Cell &p, Arena<T> &arena) {
        u = arena.take(p.rank * p.channels);
        for (T **of : {&mixed, &past, &dt, &decay}) *of = arena.take(p.channels);
        for (T **of : {&B, &C}) *of = arena.take(p.groups * p.states);
        for (T **of : {&bc, &B_length, &C_length}) *of = arena.take(p.groups);
    }
};

// max(length, eps); NaN stays NaN.
inline double at_least(double length, double eps) { return length < eps ? eps : length; }

// act(·) of d entries into `to`; its length.
template <class T, int act> double activate_all(int64_t d, const T *from, T *to) {
    Vec<T> squares{};
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> v = activate<T, act>(load<T>(from + c, lanes));
        store<T>(to + c, v, lanes);
        squares += v * v;
    });
    return std::sqrt(across<T>(squares));
}

// u_i = nrm(act(·)), U x and the u_i·u_j.
template <class T, int R>
void unit_vectors(const Cell &p, const T *row, const T *x, Token<T> &k) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    for (int i = 0; i < r; ++i) {
        T *u = k.u + i * d;
        const auto activate_by = p.act == SILU   ? activate_all<T, SILU>
                                 : p.act == RELU ? activate_all<T, RELU>
                                                 : activate_all<T, IDENTITY>;
        k.length[i] = activate_by(d, row + p.vectors + i * d, u);
        const T times = T(1 / at_least(k.length[i], p.eps));
        Vec<T> dot{};
        blocks<T>(d, [&](int64_t c, int64_t lanes) {
            const Vec<T> v = load<T>(u + c, lanes) * times;
            store<T>(u + c, v, lanes);
            dot += v * load<T>(x + c, lanes);
        });
        k.seen[i] = across<T>(dot);
        for (int j = 0; j < i && p.sequential; ++j) {
            Vec<T> gram{};
            blocks<T>(d, [&](int64_t c, int64_t lanes) {
                gram += load<T>(u + c, lanes) * load<T>(k.u + j * d + c, lanes);
            });
            k.gram[i][j] = across<T>(gram);
        }
    }
}

// T from the gates: one reflection after the other (householder), or side by side (dplr).
template <class T, int R> void reflection_map(const Cell &p, const T *row, Token<T> &k) {
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
            for (int l = j; l < i && p.sequential; ++l) entry -= k.gram[i][l] * k.own[l][j];
            k.own[i][j] = j > i ? 0 : k.gate[i] * entry;
            k.map[i][j] = k.shrink * k.own[i][j];
        }
}

// nrm of each group's n entries, or the entries themselves; their lengths.
template <class T> void group_units(const Cell &p, const T *from, T *to, T *lengths) {
    for (int64_t g = 0; g < p.groups; ++g, from += p.states, to += p.states) {
        Vec<T> squares{};
        blocks<T>(p.states, [&](int64_t k, int64_t lanes) {
            const Vec<T> v = load<T>(from + k, lanes);
            squares += v * v;
        });
        lengths[g] = std::sqrt(across<T>(squares));
        const T times = p.bc_norm ? T(1 / at_least(lengths[g], p.eps)) : T(1);
        for (int64_t k = 0; k < p.states; ++k) to[k] = from[k] * times;
    }
}

// What a token takes of its row and of x, dt: all but the state and the equation. at: its place
// among all tokens.
template <class T, int R>
void prepare(const Cell &p, int64_t at, const T *row, Token<T> &k) {
    const int64_t d = p.channels;
    const T *x = in<T>(p.x) + at * d;
    unit_vectors<T, R>(p, row, x, k);
    reflection_map<T, R>(p, row, k);
    const T kept = p.keep ? in<T>(p.keep)[at] : T(1);
    if (p.kind == MAMBA2) {
        const int64_t wide = d / p.heads;
        for (int64_t h = 0; h < p.heads; ++h) {
            const T dt = in<T>(p.dt)[at * p.heads + h];
            const T decay = exponential<T>(all_of<T>(dt * in<T>(p.A)[h]))[0] * kept;
            std::fill(k.dt + h * wide, k.dt + (h + 1) * wide, dt);
            std::fill(k.decay + h * wide, k.decay + (h + 1) * wide, decay);
        }
    } else {
        std::memcpy(k.dt, in<T>(p.dt) + at * d, d * sizeof(T));
    }
    if (p.kind == RNN) {
        for (int64_t c = 0; c < d; ++c) k.decay[c] = in<T>(p.A)[at * d + c] * kept;
        k.bc[0] = 1;
        return;
    }
    group_units<T>(p, row + p.B_at, k.B, k.B_length);
    group_units<T>(p, row + p.C_at, k.C, k.C_length);
    for (int64_t g = 0; g < p.groups; ++g) {
        Vec<T> dot{};
        blocks<T>(p.states, [&](int64_t i, int64_t lanes) {
            const int64_t from = g * p.states + i;
            dot += load<T>(k.B + from, lanes) * load<T>(k.C + from, lanes);
        });
        k.bc[g] = across<T>(dot);
    }
}

// H = decay ⊙ (h + inflow Bᵀ) and past = H C: the token before ends and this one's history begins in
// one pass. h and H (n,d), which may be one; inflow (d) and B are the token before's. RNN: H = h.
template <class T>
void advance(const Cell &p, const Token<T> &k, T kept, const T *inflow, const T *B, const T *h, T *H) {
    const int64_t n = p.states, d = p.channels;
    const T *A = in<T>(p.A);
    const auto pass = [&](auto decay_of) {
        blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
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
        pass([&](int64_t at, int64_t lanes, Vec<T> dt, Vec<T>) {
            return exponential<T>(dt * load<T>(A + at, lanes)) * kept;
        });
    if (p.kind == MAMBA2) pass([](int64_t, int64_t, Vec<T>, Vec<T> decay) { return decay; });
    if (p.kind == RNN)
        blocks<T>(d, [&](int64_t c, int64_t lanes) {
            store<T>(k.past + c, load<T>(k.decay + c, lanes) * load<T>(h + c, lanes), lanes);
        });
}

// h + inflow Bᵀ into H: a token's state, for what is kept or returned.
template <class T> void settle(const Cell &p, const T *inflow, const T *B, const T *h, T *H) {
    blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> in_c = load<T>(inflow + c, lanes);
        for (int64_t i = 0; i < p.states; ++i) {
            const int64_t at = i * p.channels + c;
            store<T>(H + at, load<T>(h + at, lanes) + in_c * B[g * p.states + i], lanes);
        }
    });
}

// x̃ = x + Σ_i u_i (T (s − U x))_i.
template <class T, int R> void mix(const Cell &p, int64_t at, Token<T> &k) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    for (int i = 0; i < r; ++i) {
        k.moves[i] = 0;
        for (int j = 0; j <= i; ++j) k.moves[i] += k.map[i][j] * (k.root[j] - k.seen[j]);
    }
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        Vec<T> mixed = load<T>(in<T>(p.x) + at * d + c, lanes);
        for (int i = 0; i < r; ++i) mixed += load<T>(k.u + i * d + c, lanes) * T(k.moves[i]);
        store<T>(k.mixed + c, mixed, lanes);
    });
}

// v = g ⊙ (past + γ ⊙ x̃) into v (d); its mean (0 without centring) and 1/√(variance + eps).
template <class T>
void before_norm(const Cell &p, int64_t at, const Token<T> &k, T *v, T &mean, T &inverse) {
    const int64_t d = p.channels;
    Vec<T> sum{}, squares{};
    blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        const Vec<T> gamma = load<T>(k.dt + c, lanes) * k.bc[g] + load_or<T>(p.D, c, lanes, 0);
        const Vec<T> whole = load<T>(k.past + c, lanes) + gamma * load<T>(k.mixed + c, lanes);
        const Vec<T> gated = p.gate ? whole * load<T>(in<T>(p.gate) + at * d + c, lanes) : whole;
        store<T>(v + c, gated, lanes);
        sum += gated;
    });
    mean = 0, inverse = 1;
    if (p.norm == NONE) return;
    if (p.norm == LAYER) mean = across<T>(sum) / T(d);
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> centred = first_lanes<T>(load<T>(v + c, lanes) - mean, lanes);
        squares += centred * centred;
    });
    inverse = 1 / std::sqrt(across<T>(squares) / T(d) + T(p.norm_eps));
}

// run(first, count) on the groups that sequences are shared out in, by several threads; together: the
// most in one.
template <class Run> void by_groups(const Cell &p, int64_t together, Run run) {
    if (p.rows == 0) return;
    const int64_t threads = std::max<int64_t>(1, p.threads);
    const int64_t most = std::min<int64_t>(together, (p.rows + threads - 1) / threads);
    const int64_t groups = (p.rows + most - 1) / most;
    const int64_t work = p.rows * p.length * p.channels * (p.reading + 8 * p.states + 32);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (groups > 1 && work > (1 << 20))
    for (int64_t i = 0; i < groups; ++i) {
        const int64_t first = p.rows * i / groups;
        run(first, p.rows * (i + 1) / groups - first);
    }
}

// A matrix (rows,d) with rows of whole vectors; itself where d fills them.
template <class T>
const T *whole_rows(const Cell &p, const void *matrix, int64_t rows, std::vector<T> &copy) {
    const int64_t d = p.channels, width = Arena<T>::whole(d);
    if (width == d) return in<T>(matrix);
    copy.assign(rows * width, T(0));
    for (int64_t j = 0; j < rows; ++j)
        std::memcpy(&copy[j * width], in<T>(matrix) + j * d, d * sizeof(T));
    return copy.data();
}

// What y_{t−1} is multiplied by, with rows of whole vectors.
template <class T> struct Maps {
    std::vector<T> copies[3];
    const T *W, *keys, *values;

    explicit Maps(const Cell &p)
        : W(whole_rows<T>(p, p.weight, p.reading, copies[0])),
          keys(whole_rows<T>(p, p.keys, p.centroids, copies[1])),
          values(whole_rows<T>(p, p.values, p.centroids, copies[2])) {}
};

// call.template operator()<R>() with the rank as a constant where there is code made for it.
template <class Call> inline void by_rank(const Cell &p, Call call) {
    if (p.rank == 1) return call(std::integral_constant<int, 1>{});
    if (p.rank == 2) return call(std::integral_constant<int, 2>{});
    if (p.rank == 4) return call(std::integral_constant<int, 4>{});
    call(std::integral_constant<int, 0>{});
}

}  // namespace
