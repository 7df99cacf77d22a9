// The exact token's gradient on a CPU: backpropagation through time, from the last token to the
// first, with the implicit function theorem in the token (cell_gradient.h). States are computed
// again from checkpoints, chunk by chunk; lm/kernels/cpu/cpu_cell.py says what is differentiated.

#include "cell_gradient.h"

namespace {

// One token of one sequence, the i-th of its group.
template <class T, int R>
void token_back(const Cell &p, int64_t row, int64_t t, int64_t i, const Token<T> &k, const T *H,
                Backward<T> &f, Sums<T> &sums, std::vector<double> &d_bc) {
    const int64_t d = p.channels, at = row * p.length + t;
    T *mu = f.mu + i * f.state, *d_row = out<T>(p.d_raw) + at * p.columns;
    const T *raw = p.kept_rows ? in<T>(p.kept_rows) + at * p.columns : in<T>(p.raw) + at * p.raw_step;
    std::fill(d_row, d_row + p.columns, T(0));
    Small s;
    T mean, inverse;
    gather_lambda<T>(p, at, i, f);
    if (p.kind == RNN)
        std::fill(f.mu_B, f.mu_B + d, T(0));
    else
        drain<T>(p, k, mu, f);
    before_norm<T>(p, at, k, f.v, mean, inverse);
    reduce<T, R>(p, at, k, mean, inverse, f, s);
    attach<R>(p, p.outcome[at] & FAILED, s);
    through_y<T, R>(p, at, row, k, inverse, f, s, sums, d_bc.data());
    through_map<T, R>(p, k, s);
    through_vectors<T, R>(p, at, raw, k, s, f);
    for (int64_t j = 0; j < p.rank; ++j) d_row[p.gates + j] = T(s.d_gate[j]);
    const T kept = p.keep ? in<T>(p.keep)[at] : T(1);
    if (p.kind == RNN) {
        const T *h = t ? in<T>(p.y) + (at - 1) * d : p.h0 ? in<T>(p.h0) + row * d : f.zeros;
        for (int64_t c = 0; c < d; ++c) {
            out<T>(p.dA)[at * d + c] = f.e[c] * h[c] * kept;
            mu[c] = f.e[c] * k.decay[c];
            out<T>(p.ddt)[at * d + c] = f.ddt[c];
        }
        return;
    }
    through_state<T>(p, k, kept, H, mu, f, &sums.dA[row * sums.A]);
    through_units<T>(p, f.dB, k.B, k.C, d_bc.data(), k.B_length, d_row + p.B_at);
    through_units<T>(p, f.dC, k.C, k.B, d_bc.data(), k.C_length, d_row + p.C_at);
    if (p.kind == MAMBA1)
        return void(std::memcpy(out<T>(p.ddt) + at * d, f.ddt, d * sizeof(T)));
    for (int64_t h = 0, wide = d / p.heads; h < p.heads; ++h) {
        T sum = 0;
        for (int64_t c = h * wide; c < (h + 1) * wide; ++c) sum += f.ddt[c];
        out<T>(p.ddt)[at * p.heads + h] = sum;
    }
}

// carried, the gradient of what token t has read, through the centroids to y_{t−1}.
template <class T>
void through_centroids(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
                       Backward<T> &f) {
    const int64_t k = p.centroids, d = p.channels, tokens = first * p.length + t;
    const int64_t step = p.length * k;
    T *d_logits = out<T>(p.d_logits) + tokens * k;
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(out<T>(p.d_reads) + (tokens + i * p.length) * d, f.carried + i * f.width,
                    d * sizeof(T));
        std::fill(d_logits + i * step, d_logits + i * step + k, T(0));
    }
    by_parts(count, [&](int64_t i, auto S) {
        const T *carried = f.carried + i * f.width;
        T *to = d_logits + i * step;
        project_some<T, decltype(S)::value>(maps.values, k, f.width, carried, to, step);
    });
    for (int64_t i = 0; i < count; ++i) {
        const T *alpha = in<T>(p.alphas) + tokens * k + i * step;
        T *d_logit = d_logits + i * step;
        Vec<T> sums{};
        blocks<T>(k, [&](int64_t j, int64_t lanes) {
            sums += load<T>(alpha + j, lanes) * load<T>(d_logit + j, lanes);
        });
        const T mean = across<T>(sums);
        for (int64_t j = 0; j < k; ++j) d_logit[j] = alpha[j] * (d_logit[j] - mean);
    }
    by_parts(count, [&](int64_t i, auto S) {
        T *carried = f.carried + i * f.width;
        const T *from = d_logits + i * step;
        gather_some<T, decltype(S)::value>(maps.keys, k, f.width, from, step, carried);
    });
    for (int64_t i = 0; i < count && p.d_noise; ++i)
        std::memcpy(out<T>(p.d_noise) + (tokens + i * p.length) * d, f.carried + i * f.width,
                    d * sizeof(T));
}

// carried of token t − 1 from the rows' gradients at t: through the weight and the centroids, kept.
template <class T>
void carry(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
           Backward<T> &f) {
    const int64_t step = p.length * p.columns;
    const T *rows = in<T>(p.d_raw) + (first * p.length + t) * p.columns;
    by_parts(count, [&](int64_t i, auto S) {
        gather_some<T, decltype(S)::value>(maps.W, p.reading, f.width, rows + i * step, step,
                                           f.carried + i * f.width);
    });
    if (p.centroids) through_centroids<T>(p, first, count, t, maps, f);
    for (int64_t i = 0; i < count; ++i) {
        T *carried = f.carried + i * f.width;
        const T times = p.keep ? in<T>(p.keep)[(first + i) * p.length + t] : T(1);
        for (int64_t c = 0; c < f.width; c += LANES<T>)
            put<T>(carried + c, vector_at<T>(carried + c) * times);
    }
}

template <class T, int R>
void group_back(const Cell &p, int64_t first, int64_t count, const Maps<T> &maps, Sums<T> &sums) {
    const int64_t d = p.channels, chunks = (p.length + p.every - 1) / p.every;
    Backward<T> f(p, count);
    std::vector<double> d_bc(p.groups), most(count);
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t t = 0; t < p.length; ++t) {
            Vec<T> squares{};
            blocks<T>(d, [&](int64_t c, int64_t lanes) {
                const int64_t at = (first + i) * p.length + t;
                const Vec<T> v = load<T>(in<T>(p.grad_y) + at * d + c, lanes);
                squares += v * v;
            });
            const double size = std::sqrt(double(across<T>(squares)));
            if (!(size <= most[i])) most[i] = size;
        }
    }
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
        const int64_t start = chunk * p.every, steps = std::min(p.every, p.length - start);
        const auto H_of = [&](int64_t i, int64_t t) {
            return f.H ? f.H + (i * p.every + t) * f.state : nullptr;
        };
        for (int64_t i = 0; i < count; ++i)
            again<T, R>(p, first + i, start, steps, &f.tokens[i * p.every], H_of(i, 0), f);
        for (int64_t t = steps - 1; t >= 0; --t) {
            for (int64_t i = 0; i < count; ++i) {
                const Token<T> &k = f.tokens[i * p.every + t];
                token_back<T, R>(p, first + i, start + t, i, k, H_of(i, t), f, sums, d_bc);
            }
            // Centroids are read before the first token, too.
            if (start + t > 0 || p.centroids) carry<T>(p, first, count, start + t, maps, f);
        }
    }
    for (int64_t i = 0; i < count && p.adjoint; ++i)
        out<T>(p.adjoint)[first + i] = T(most[i] == 0 ? 0 : f.largest[i] / most[i]);
}

// The sum of every sequence's, in order.
template <class T> void add_up(void *to, const std::vector<T> &from, int64_t rows, int64_t size) {
    if (!to) return;
    T *sum = out<T>(to);
    std::fill(sum, sum + size, T(0));
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < size; ++i) sum[i] += from[row * size + i];
}

// y_{t−1} of token `at`, as its row read it, from channel c on: zeros where there was none.
template <class T> void read_before(const Cell &p, int64_t at, int64_t c, int64_t wide, T *to) {
    const int64_t d = p.channels, here = std::min(wide, d - c), t = at % p.length;
    const T *before = t ? in<T>(p.y) + (at - 1) * d : p.y0 ? in<T>(p.y0) + at / p.length * d : nullptr;
    if (p.reads) before = in<T>(p.reads) + at * d;
    const T kept = p.keep && !p.reads ? in<T>(p.keep)[at] : T(1);
    for (int64_t i = 0; i < wide; ++i) to[i] = before && i < here ? before[c + i] * kept : T(0);
}

// The gradient of the weight of sh(y), Σ_t d_rowᵀ y_{t−1}: a panel of columns at a time, whose y_{t−1}
// of some tokens stay in the cache for all rows.
template <class T> void of_weight(const Cell &p) {
    constexpr int64_t TOKENS = 128, wide = WIDE * LANES<T>;
    const int64_t d = p.channels, tokens = p.rows * p.length, panels = (d + wide - 1) / wide;
#pragma omp parallel for schedule(dynamic) num_threads(p.threads) if (tokens * p.reading * d > (1 << 22))
    for (int64_t panel = 0; panel < panels; ++panel) {
        Arena<T> arena(TOKENS * wide + p.reading * wide);
        T *before = arena.take(TOKENS * wide), *sums = arena.take(p.reading * wide);
        std::fill(sums, sums + p.reading * wide, T(0));
        for (int64_t first = 0; first < tokens; first += TOKENS) {
            const int64_t here = std::min(TOKENS, tokens - first);
            for (int64_t t = 0; t < here; ++t)
                read_before<T>(p, first + t, panel * wide, wide, before + t * wide);
            for (int64_t j = 0; j < p.reading; j += TALL) {
                const T *rows = in<T>(p.d_raw) + first * p.columns + j;
                const int64_t tall = std::min<int64_t>(TALL, p.reading - j);
                outer_tile<T>(rows, p.columns, before, here, tall, sums + j * wide);
            }
        }
        const int64_t here = std::min(wide, d - panel * wide);
        for (int64_t j = 0; j < p.reading; ++j)
            std::memcpy(out<T>(p.d_weight) + j * d + panel * wide, sums + j * wide, here * sizeof(T));
    }
}

template <class T> void backward(const Cell &p) {
    const Maps<T> maps(p);
    Sums<T> sums(p);
    by_rank(p, [&](auto R) {
        by_groups(p, TOGETHER, [&](int64_t first, int64_t count) {
            group_back<T, decltype(R)::value>(p, first, count, maps, sums);
        });
    });
    if (p.d_weight) of_weight<T>(p);
    if (p.kind != RNN) add_up<T>(p.dA, sums.dA, p.rows, sums.A);
    add_up<T>(p.dD, sums.dD, p.rows, p.channels);
    add_up<T>(p.d_norm_weight, sums.d_weight, p.rows, p.channels);
    add_up<T>(p.d_norm_bias, sums.d_bias, p.rows, p.channels);
}

}  // namespace

extern "C" void cell_backward_float(const Cell *p) { backward<float>(*p); }
extern "C" void cell_backward_double(const Cell *p) { backward<double>(*p); }
