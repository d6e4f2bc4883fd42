//! Rotary embedding: which frequencies a config asks for. Sources: RoFormer (2104.09864), Llama 3.1's
//! frequency-wise scaling, YaRN (2309.00071).

use std::f64::consts::PI;

use serde_json::Value;

use super::config::ConfigError;
use super::families::Family;

/// Frequencies of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians per position, one for each pair of channels.
    pub inv_freq: Vec<f32>,
    /// Multiplies cosine and sine (YaRN's attention factor).
    pub factor: f32,
}

impl Rope {
    /// Cosines and sines for `positions` positions, `[positions, frequencies]` each.
    pub fn table(&self, positions: usize) -> [Vec<f32>; 2] {
        let angle = |p: usize| self.inv_freq.iter().map(move |f| (p as f32 * f) as f64);
        [
            (0..positions).flat_map(|p| angle(p).map(|a| a.cos() as f32 * self.factor)).collect(),
            (0..positions).flat_map(|p| angle(p).map(|a| a.sin() as f32 * self.factor)).collect(),
        ]
    }
}

/// The ropes of a model: one, or with `local` two (full layers, sliding layers).
pub fn parse(
    config: &Value,
    family: &Family,
    local: bool,
    head_dim: usize,
    max_positions: usize,
) -> Result<Vec<Rope>, ConfigError> {
    let object = |key: &str| match config.get(key).filter(|v| !v.is_null()) {
        Some(v) if !v.is_object() => {
            Err(ConfigError::Value { key: key.into(), found: v.to_string(), wanted: "an object is needed".into() })
        }
        found => Ok(found),
    };
    let number = |key: &str| config.get(key).and_then(Value::as_f64);
    let theta = number("rope_theta").unwrap_or(family.defaults.rope_theta);
    // Configs written before transformers 5 say `rope_scaling`, later ones `rope_parameters`.
    let parameters = object("rope_scaling")?.or(object("rope_parameters")?);
    let nested = parameters.filter(|p| p.get("full_attention").is_some() || p.get("sliding_attention").is_some());
    let shape = Shape {
        head_dim,
        max_positions,
        partial: number("partial_rotary_factor"),
        original: number("original_max_position_embeddings"),
    };
    let full = match nested {
        Some(both) => both.get("full_attention"),
        None => parameters,
    };
    let mut ropes = vec![one(full, theta, &shape)?];
    if local {
        let theta = number("rope_local_base_freq").unwrap_or(family.defaults.local_rope_theta);
        ropes.push(one(nested.and_then(|both| both.get("sliding_attention")), theta, &shape)?);
    }
    Ok(ropes)
}

struct Shape {
    head_dim: usize,
    max_positions: usize,
    partial: Option<f64>,
    /// A top-level `original_max_position_embeddings`, which wins.
    original: Option<f64>,
}

fn one(parameters: Option<&Value>, theta: f64, shape: &Shape) -> Result<Rope, ConfigError> {
    let get = |key: &str| parameters.and_then(|p| p.get(key)).filter(|v| !v.is_null());
    let number = |key: &str| get(key).and_then(Value::as_f64);
    let bad = |key: &str, wanted: &str| ConfigError::Value {
        key: format!("rope_scaling.{key}"),
        found: get(key).map_or("missing".into(), Value::to_string),
        wanted: wanted.into(),
    };
    let need = |key: &str| number(key).filter(|n| *n > 0.0).ok_or_else(|| bad(key, "a positive number is needed"));
    let theta = number("rope_theta").unwrap_or(theta);
    if !(theta > 1.0 && theta.is_finite()) {
        return Err(ConfigError::Value {
            key: "rope_theta".into(),
            found: theta.to_string(),
            wanted: "a number above 1 is needed".into(),
        });
    }
    let partial = shape.partial.or_else(|| number("partial_rotary_factor")).unwrap_or(1.0).clamp(0.0, 1.0);
    let dim = (shape.head_dim as f64 * partial) as usize / 2 * 2;
    let base: Vec<f64> = (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect();
    let original =
        shape.original.or_else(|| number("original_max_position_embeddings")).unwrap_or(shape.max_positions as f64);
    let kind = match get("rope_type").or(get("type")) {
        None => "default",
        Some(kind) => kind.as_str().ok_or_else(|| bad("rope_type", "a name is needed"))?,
    };
    let (inv_freq, factor) = match kind {
        "default" => (base, 1.0),
        "linear" => {
            let factor = need("factor")?;
            (base.iter().map(|f| f / factor).collect(), 1.0)
        }
        "llama3" => {
            let (factor, low, high) = (need("factor")?, need("low_freq_factor")?, need("high_freq_factor")?);
            (base.iter().map(|&f| llama3(f, factor, low, high, original)).collect(), 1.0)
        }
        "yarn" => yarn(&base, dim, theta, original, need("factor")?, &number, get("truncate").and_then(Value::as_bool)),
        _ => return Err(bad("rope_type", "known are default, linear, llama3, yarn")),
    };
    Ok(Rope { inv_freq: inv_freq.into_iter().map(|f| f as f32).collect(), factor: factor as f32 })
}

fn llama3(inv: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * PI / inv;
    if wavelength > original / low {
        inv / factor
    } else if wavelength < original / high {
        inv
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * inv / factor + smooth * inv
    }
}

fn yarn(
    base: &[f64],
    dim: usize,
    theta: f64,
    original: f64,
    factor: f64,
    number: &dyn Fn(&str) -> Option<f64>,
    truncate: Option<bool>,
) -> (Vec<f64>, f64) {
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let nonzero = |key: &str| number(key).filter(|n| *n != 0.0);
    let attention =
        number("attention_factor").unwrap_or_else(|| match (nonzero("mscale"), nonzero("mscale_all_dim")) {
            (Some(one), Some(all)) => scale(one) / scale(all),
            _ => scale(1.0),
        });
    // The pair of channels that turns `r` times over the original context.
    let pair = |r: f64| dim as f64 * (original / (r * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair(number("beta_fast").unwrap_or(32.0)), pair(number("beta_slow").unwrap_or(1.0)));
    if truncate.unwrap_or(true) {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let blend = |(i, inv): (usize, &f64)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        inv / factor * ramp + inv * (1.0 - ramp)
    };
    (base.iter().enumerate().map(blend).collect(), attention)
}
