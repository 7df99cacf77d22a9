// The part of the C++ standard library that cell_root.h uses. NVRTC has no headers of its own.

#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

namespace std {
inline double abs(double value) { return ::fabs(value); }
inline double sqrt(double value) { return ::sqrt(value); }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline void swap(T &a, T &b) {
    T old = a;
    a = b;
    b = old;
}
template <class T> struct numeric_limits;
template <> struct numeric_limits<double> {
    static constexpr double max() { return 1.7976931348623157e308; }
    static constexpr double epsilon() { return 2.220446049250313e-16; }
    static double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
};
}  // namespace std
