//! The file types of llama.cpp: names for mixtures of tensor types.

use crate::num::ggml::GgmlType::{self, *};

/// What is asked for: a mixture of types under one name.
#[allow(non_camel_case_types, reason = "llama.cpp's own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q2_K_S,
    Q3_K_S,
    Q3_K_M,
    Q3_K_L,
    Q4_K_S,
    Q4_K_M,
    Q5_K_S,
    Q5_K_M,
    Q6_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ2_M,
    IQ3_XXS,
    IQ3_XS,
    IQ3_S,
    IQ3_M,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4_MOE,
}

use FileType as F;

/// File type, name, number in `general.file_type`, the type that most tensors get.
const TABLE: [(FileType, &str, u32, GgmlType); 33] = [
    (F::F32, "F32", 0, F32),
    (F::F16, "F16", 1, F16),
    (F::BF16, "BF16", 32, BF16),
    (F::Q4_0, "Q4_0", 2, Q4_0),
    (F::Q4_1, "Q4_1", 3, Q4_1),
    (F::Q5_0, "Q5_0", 8, Q5_0),
    (F::Q5_1, "Q5_1", 9, Q5_1),
    (F::Q8_0, "Q8_0", 7, Q8_0),
    (F::Q2_K, "Q2_K", 10, Q2_K),
    (F::Q2_K_S, "Q2_K_S", 21, Q2_K),
    (F::Q3_K_S, "Q3_K_S", 11, Q3_K),
    (F::Q3_K_M, "Q3_K_M", 12, Q3_K),
    (F::Q3_K_L, "Q3_K_L", 13, Q3_K),
    (F::Q4_K_S, "Q4_K_S", 14, Q4_K),
    (F::Q4_K_M, "Q4_K_M", 15, Q4_K),
    (F::Q5_K_S, "Q5_K_S", 16, Q5_K),
    (F::Q5_K_M, "Q5_K_M", 17, Q5_K),
    (F::Q6_K, "Q6_K", 18, Q6_K),
    (F::IQ1_S, "IQ1_S", 24, IQ1_S),
    (F::IQ1_M, "IQ1_M", 31, IQ1_M),
    (F::IQ2_XXS, "IQ2_XXS", 19, IQ2_XXS),
    (F::IQ2_XS, "IQ2_XS", 20, IQ2_XS),
    // The names moved on when IQ2_S, the finer type, came to be.
    (F::IQ2_S, "IQ2_S", 28, IQ2_XS),
    (F::IQ2_M, "IQ2_M", 29, IQ2_S),
    (F::IQ3_XXS, "IQ3_XXS", 23, IQ3_XXS),
    (F::IQ3_XS, "IQ3_XS", 22, IQ3_S),
    (F::IQ3_S, "IQ3_S", 26, IQ3_S),
    (F::IQ3_M, "IQ3_M", 27, IQ3_S),
    (F::IQ4_NL, "IQ4_NL", 25, IQ4_NL),
    (F::IQ4_XS, "IQ4_XS", 30, IQ4_XS),
    (F::TQ1_0, "TQ1_0", 36, TQ1_0),
    (F::TQ2_0, "TQ2_0", 37, TQ2_0),
    (F::MXFP4_MOE, "MXFP4_MOE", 38, MXFP4),
];

impl FileType {
    /// Every file type.
    pub fn all() -> impl Iterator<Item = FileType> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (FileType, &'static str, u32, GgmlType) {
        // The table stands in the order of the declaration, but for BF16; a test goes through it.
        TABLE.iter().find(|row| row.0 == self).unwrap_or(&TABLE[0])
    }

    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The number in `general.file_type`.
    pub fn number(self) -> u32 {
        self.row().2
    }

    /// The type that most tensors get.
    pub fn base(self) -> GgmlType {
        self.row().3
    }

    /// By name, in upper or lower case; `Q3_K`, `Q4_K` and `Q5_K` mean the middle size, `MXFP4` the mixture.
    pub fn parse(name: &str) -> Option<Self> {
        let name = match &*name.to_ascii_uppercase() {
            short @ ("Q3_K" | "Q4_K" | "Q5_K") => format!("{short}_M"),
            "MXFP4" => "MXFP4_MOE".into(),
            other => other.to_string(),
        };
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    pub fn from_number(number: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.2 == number).map(|row| row.0)
    }
}

impl std::fmt::Display for FileType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
