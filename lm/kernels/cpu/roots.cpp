// The `roots` kernel: solves the small equations of n tokens, given their coefficients (find_root in
// lm/model/cell.py). cell_root.h has the search, which the `cell` kernel uses as well.

#include "cell_root.h"

// Arguments, packed field by field in roots.py. All arrays are contiguous.
struct Roots {
    int64_t tokens, rank, threads, uses_picard_only;
    double floor;
    const void *alpha, *beta, *delta;      // (n,r) (n,r,r) (n,r)
    const void *gamma0, *gamma1, *gamma2;  // (n) (n,r) (n,r,r)
    void *s;                               // (n,r)
    uint8_t *outcome;                      // (n)
    int32_t *evaluations;                  // (n) evaluations of φ, or null
};

namespace {

template <class T> Equation load_equation(const Roots &p, int64_t token) {
    const int64_t r = p.rank;
    const auto *alpha = static_cast<const T *>(p.alpha) + token * r;
    const auto *beta = static_cast<const T *>(p.beta) + token * r * r;
    const auto *delta = static_cast<const T *>(p.delta) + token * r;
    const auto *gamma1 = static_cast<const T *>(p.gamma1) + token * r;
    const auto *gamma2 = static_cast<const T *>(p.gamma2) + token * r * r;
    Equation eq;
    eq.gamma0 = static_cast<const T *>(p.gamma0)[token];
    eq.floor = p.floor;
    eq.rounding = std::numeric_limits<T>::epsilon();
    for (int64_t i = 0; i < r; ++i) {
        eq.alpha[i] = alpha[i];
        eq.delta[i] = delta[i];
        eq.gamma1[i] = gamma1[i];
        for (int64_t j = 0; j < r; ++j) {
            eq.beta[i][j] = beta[i * r + j];
            eq.gamma2[i][j] = gamma2[i * r + j];
        }
    }
    return eq;
}

template <class T, int R> void search(const Roots &p) {
#pragma omp parallel for num_threads(p.threads) schedule(dynamic, 16)
    for (int64_t token = 0; token < p.tokens; ++token) {
        const Equation eq = load_equation<T>(p, token);
        Point point;
        const uint8_t outcome =
            p.uses_picard_only ? solve_by_picard<R>(eq, p.rank, point.s) : solve<R>(eq, p.rank, point.s);
        p.outcome[token] = outcome;
        if (p.evaluations) p.evaluations[token] = eq.evaluations;
        bool is_nonfinite = false;  // if the equation has NaN or infinity, the result is NaN
        if (outcome == FAILED) {
            evaluate<R>(eq, p.rank, point);
            is_nonfinite = !(point.residual <= std::numeric_limits<double>::max());
        }
        T *s = static_cast<T *>(p.s) + token * p.rank;
        for (int64_t i = 0; i < p.rank; ++i)
            s[i] = is_nonfinite ? std::numeric_limits<T>::quiet_NaN() : T(point.s[i]);
    }
}

template <class T> void search_all(const Roots &p) {
    switch (p.rank) {
        case 1: return search<T, 1>(p);
        case 2: return search<T, 2>(p);
        case 4: return search<T, 4>(p);
        default: return search<T, 0>(p);
    }
}

}  // namespace

extern "C" void roots_float(const Roots *p) { search_all<float>(*p); }
extern "C" void roots_double(const Roots *p) { search_all<double>(*p); }
