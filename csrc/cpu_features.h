// What this CPU and its operating system can run.
#pragma once

namespace hr {

bool has_avx2();         // AVX2, FMA and F16C
bool has_avx_vnni();     // those, and VNNI on 256 bits
bool has_avx512();       // F, BW, VL and DQ
bool has_avx512_vnni();  // those, and VNNI
bool has_avx512_bf16();  // those, and BF16
bool has_amx_bf16();     // those, and tiles that multiply bf16 and int8; asks the system for leave to use them

}  // namespace hr
