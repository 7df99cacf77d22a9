// The `roots` kernel: solves the small equations of n tokens, given their coefficients (find_root in
// lm/model/cell.py). cell_root.h has the search, which the `cell` kernel uses as well.

#include "cell_root.h"

// Arguments, packed field by field in roots.py. All arrays are contiguous.
struct Roots {
    int64_t tokens, rank, threads, without_certified_search;
    double floor;
    const void *alpha, *beta, *delta;      // (n,r) (n,r,r) (n,r)
    const void *gamma0, *gamma1, *gamma2;  // (n) (n,r) (n,r,r)
    void *s;                               // (n,r)
    uint8_t *outcome;                      // (n)
    int32_t *evaluations;                  // (n) evaluations of φ, or null
};

namespace {

template <class T> Equation load_equation(const Roots &roots, int64_t token) {
    const int64_t r = roots.rank;
    const auto *alpha = static_cast<const T *>(roots.alpha) + token * r;
    const auto *beta = static_cast<const T *>(roots.beta) + token * r * r;
    const auto *delta = static_cast<const T *>(roots.delta) + token * r;
    const auto *gamma1 = static_cast<const T *>(roots.gamma1) + token * r;
    const auto *gamma2 = static_cast<const T *>(roots.gamma2) + token * r * r;
    Equation eq;
    eq.gamma0 = static_cast<const T *>(roots.gamma0)[token];
    eq.floor = roots.floor;
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

template <class T, int R> void search(const Roots &roots) {
#pragma omp parallel for num_threads(roots.threads) schedule(dynamic, 16)
    for (int64_t token = 0; token < roots.tokens; ++token) {
        const Equation eq = load_equation<T>(roots, token);
        Point point;
        const uint8_t outcome =
            roots.without_certified_search ? solve_by_picard<R>(eq, roots.rank, point.s)
                                           : solve<R>(eq, roots.rank, point.s);
        roots.outcome[token] = outcome;
        // The search has counted the evaluations: this field of the constant `eq` is mutable.
        if (roots.evaluations) roots.evaluations[token] = eq.evaluations;
        bool is_nonfinite = false;  // if the equation has NaN or infinity, the result is NaN
        if (outcome == FAILED) {
            evaluate<R>(eq, roots.rank, point);
            is_nonfinite = !(point.residual <= std::numeric_limits<double>::max());
        }
        T *s = static_cast<T *>(roots.s) + token * roots.rank;
        for (int64_t i = 0; i < roots.rank; ++i)
            s[i] = is_nonfinite ? std::numeric_limits<T>::quiet_NaN() : T(point.s[i]);
    }
}

template <class T> void search_all(const Roots &roots) {
    switch (roots.rank) {
        case 1: return search<T, 1>(roots);
        case 2: return search<T, 2>(roots);
        case 4: return search<T, 4>(roots);
        default: return search<T, 0>(roots);
    }
}

}  // namespace

extern "C" void roots_float(const Roots *roots) { search_all<float>(*roots); }
extern "C" void roots_double(const Roots *roots) { search_all<double>(*roots); }
