//! The vector instructions that multiply bytes.

/// The vectors of an instruction set.
pub trait Dot: Copy {
    /// Sums of a vector: four bytes go into each.
    const LANES: usize;
    type Vector: Copy;

    fn zero() -> Self::Vector;
    /// # Safety
    /// `LANES * 4` bytes must be readable. This and all others need the instruction set.
    unsafe fn load(from: *const u8) -> Self::Vector;
    /// Four bytes in each lane.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn splat(from: *const i8) -> Self::Vector;
    /// Every byte plus 128.
    ///
    /// # Safety
    /// The instruction set must be there.
    unsafe fn lift(v: Self::Vector) -> Self::Vector;
    /// sum + unsigned bytes * signed bytes.
    ///
    /// # Safety
    /// The instruction set must be there.
    unsafe fn dot(sum: Self::Vector, unsigned: Self::Vector, signed: Self::Vector) -> Self::Vector;
    /// # Safety
    /// The instruction set must be there; `to` takes `LANES` numbers.
    unsafe fn store(v: Self::Vector, to: *mut i32);
}

/// What every processor does.
#[derive(Clone, Copy)]
pub struct Plain;

impl Dot for Plain {
    const LANES: usize = 8;
    type Vector = [u32; 8];

    #[inline(always)]
    fn zero() -> Self::Vector {
        [0; 8]
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self::Vector {
        // SAFETY: by the contract.
        unsafe { from.cast::<[u32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn splat(from: *const i8) -> Self::Vector {
        // SAFETY: by the contract.
        [unsafe { from.cast::<u32>().read_unaligned() }; 8]
    }

    #[inline(always)]
    unsafe fn lift(v: Self::Vector) -> Self::Vector {
        v.map(|v| v ^ 0x8080_8080)
    }

    #[inline(always)]
    unsafe fn dot(mut sum: Self::Vector, unsigned: Self::Vector, signed: Self::Vector) -> Self::Vector {
        for i in 0..8 {
            let (u, s) = (unsigned[i].to_ne_bytes(), signed[i].to_ne_bytes());
            for j in 0..4 {
                sum[i] = sum[i].wrapping_add((i32::from(u[j]) * i32::from(s[j] as i8)) as u32);
            }
        }
        sum
    }

    #[inline(always)]
    unsafe fn store(v: Self::Vector, to: *mut i32) {
        // SAFETY: by the contract.
        unsafe { to.cast::<[u32; 8]>().write_unaligned(v) }
    }
}

#[cfg(target_arch = "x86_64")]
pub mod x86 {
    use std::arch::x86_64::*;

    use super::Dot;

    macro_rules! vectors {
        ($(#[$doc:meta])* $name:ident, $type:ident, $lanes:literal, $zero:ident, $load:ident, $splat:ident, $xor:ident,
         $store:ident, $dot:expr) => {
            $(#[$doc])*
            #[derive(Clone, Copy)]
            pub struct $name;

            impl Dot for $name {
                const LANES: usize = $lanes;
                type Vector = $type;

                #[inline(always)]
                fn zero() -> $type {
                    // SAFETY: by the contract.
                    unsafe { $zero() }
                }

                #[inline(always)]
                unsafe fn load(from: *const u8) -> $type {
                    // SAFETY: by the contract.
                    unsafe { $load(from.cast()) }
                }

                #[inline(always)]
                unsafe fn splat(from: *const i8) -> $type {
                    // SAFETY: by the contract.
                    unsafe { $splat(from.cast::<i32>().read_unaligned()) }
                }

                #[inline(always)]
                unsafe fn lift(v: $type) -> $type {
                    // SAFETY: by the contract.
                    unsafe { $xor(v, $splat(0x8080_8080u32 as i32)) }
                }

                #[inline(always)]
                unsafe fn dot(sum: $type, unsigned: $type, signed: $type) -> $type {
                    // SAFETY: by the contract.
                    unsafe { $dot(sum, unsigned, signed) }
                }

                #[inline(always)]
                unsafe fn store(v: $type, to: *mut i32) {
                    // SAFETY: by the contract.
                    unsafe { $store(to.cast(), v) }
                }
            }
        };
    }

    vectors!(
        /// AVX-512 VNNI.
        Wide, __m512i, 16, _mm512_setzero_si512, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_xor_si512,
        _mm512_storeu_si512, _mm512_dpbusd_epi32
    );
    vectors!(
        /// AVX-VNNI.
        Narrow, __m256i, 8, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_xor_si256,
        _mm256_storeu_si256, _mm256_dpbusd_avx_epi32
    );
    vectors!(
        /// AVX2.
        Pairs, __m256i, 8, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_xor_si256,
        _mm256_storeu_si256, pairs
    );

    /// Even and odd bytes as 16-bit numbers, so that no sum of two products is cut off.
    ///
    /// # Safety
    /// AVX2 must be there.
    #[inline(always)]
    unsafe fn pairs(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        // SAFETY: by the contract.
        unsafe {
            let even = _mm256_madd_epi16(
                _mm256_and_si256(unsigned, _mm256_set1_epi16(255)),
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(signed)),
            );
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(unsigned), _mm256_srai_epi16::<8>(signed));
            _mm256_add_epi32(sum, _mm256_add_epi32(even, odd))
        }
    }
}

/// The instructions to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Set {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Set {
    /// Those of this processor, the best first.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512bw") {
                all.push(Set::Avx512);
            }
            if is_x86_feature_detected!("avxvnni") && is_x86_feature_detected!("avx2") {
                all.push(Set::AvxVnni);
            }
            if is_x86_feature_detected!("avx2") {
                all.push(Set::Avx2);
            }
        }
        all.push(Set::Plain);
        all
    }
}
