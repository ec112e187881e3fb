// Numbers as two bf16 digits: the bf16 of a number, and the bf16 of what is left of it, 16 bits or so together.
#pragma once
#include "vec.h"

#if defined(__AVX512BF16__)
namespace hr {
namespace HR_ISA {

namespace {

inline __m512i digit_words(__m512bh v) { return reinterpret_cast<__m512i>(v); }

// 32 numbers, of which `first` are the lower 16, as one digit each.
inline __m512i digit_of(__m512 first, __m512 second) { return digit_words(_mm512_cvtne2ps_pbh(second, first)); }

struct DigitWords {
  __m512i high, low;
};

inline DigitWords digits_of(__m512 first, __m512 second) {
  const __m512i words = digit_of(first, second);
  const __m512i whole_first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)), 16);
  const __m512i whole_second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)), 16);
  const __m512 rest_first = _mm512_sub_ps(first, _mm512_castsi512_ps(whole_first));
  const __m512 rest_second = _mm512_sub_ps(second, _mm512_castsi512_ps(whole_second));
  return {words, digit_of(rest_first, rest_second)};
}

// One or two digits of 32 numbers, each digit's words where it belongs.
template <int DIGITS>
inline void store_digits(__m512 first, __m512 second, uint16_t* high, uint16_t* low) {
  if constexpr (DIGITS == 1) {
    _mm512_storeu_si512(high, digit_of(first, second));
  } else {
    const DigitWords digits = digits_of(first, second);
    _mm512_storeu_si512(high, digits.high);
    _mm512_storeu_si512(low, digits.low);
  }
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
#endif
