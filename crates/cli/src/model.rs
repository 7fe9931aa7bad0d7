//! How many bytes of KV cache a model keeps, from a built-in table or a Hugging Face config.json.
//!
//! Every layer counts as an attention layer with the same cache. That overstates models that mix
//! in linear attention; the built-in `kimi-k3` therefore names its attention layers only.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{fmt, fs};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The KV cache of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvModel {
    /// What to call it in a report.
    pub name: String,
    /// Layers that keep a cache.
    pub layers: NonZeroU64,
    /// Bytes per token of each cache tensor of a layer: K and V, or the one latent of MLA.
    pub tensors: Vec<NonZeroU64>,
    /// Heads that each tensor divides into; MLA's latent is one for all heads.
    pub heads: Option<NonZeroU64>,
}

impl KvModel {
    /// Reads a Hugging Face config.json, the outer object or its `text_config`.
    ///
    /// `kv_lora_rank` makes it an MLA model. Every number must be positive.
    pub fn from_config(path: &Path) -> Result<Self, ModelError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        let outer: Value = serde_json::from_str(&text)
            .map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
        let config = Config {
            path,
            outer: &outer,
            model: outer.get("text_config").filter(|inner| inner.is_object()).unwrap_or(&outer),
        };
        config.kv_model()
    }

    /// The slice, if the heads of this model divide so.
    ///
    /// # Errors
    /// [`ModelError::Slice`].
    pub fn slice_of_heads(&self, slice: HeadSlice) -> Result<HeadSlice, ModelError> {
        match self.heads {
            Some(heads) if heads.get().is_multiple_of(slice.of()) => Ok(slice),
            _ => Err(ModelError::Slice { name: self.name.clone(), heads: self.heads, slice }),
        }
    }

    /// Bytes per token over all layers; `None` if they overflow 64 bits.
    pub fn bytes_per_token(&self) -> Option<u64> {
        let layer =
            self.tensors.iter().try_fold(0u64, |sum, tensor| sum.checked_add(tensor.get()))?;
        layer.checked_mul(self.layers.get())
    }
}

impl FromStr for KvModel {
    type Err = ModelError;

    /// Finds a built-in model by its name, in any case.
    fn from_str(name: &str) -> Result<Self, ModelError> {
        let &(name, layers, tensors, heads) = BUILT_IN
            .iter()
            .find(|(known, ..)| known.eq_ignore_ascii_case(name))
            .ok_or_else(|| ModelError::Unknown { name: name.to_owned() })?;
        let positive = |number| {
            NonZeroU64::new(number)
                .expect("the table below has no zero, and a test reads all of it")
        };
        Ok(Self {
            name: name.to_owned(),
            layers: positive(layers),
            tensors: tensors.iter().copied().map(positive).collect(),
            heads: NonZeroU64::new(heads),
        })
    }
}

/// The heads of one of several tensor-parallel ranks: `2/4` is the second quarter.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct HeadSlice {
    rank: NonZeroU32,
    ranks: NonZeroU32,
}

impl HeadSlice {
    /// Which slice it is, from 0 on.
    pub fn index(self) -> u64 {
        u64::from(self.rank.get() - 1)
    }

    /// How many slices there are.
    pub fn of(self) -> u64 {
        self.ranks.get().into()
    }
}

impl fmt::Display for HeadSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.rank, self.ranks)
    }
}

impl FromStr for HeadSlice {
    type Err = BadHeadSlice;

    fn from_str(text: &str) -> Result<Self, BadHeadSlice> {
        let numbers = text.split_once('/').and_then(|(rank, ranks)| {
            Some(Self { rank: rank.parse().ok()?, ranks: ranks.parse().ok()? })
        });
        numbers
            .filter(|slice| slice.rank <= slice.ranks)
            .ok_or_else(|| BadHeadSlice(text.to_owned()))
    }
}

/// A text that is no slice of heads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no slice of heads: expected K/N with K from 1 to N, such as 1/4")]
pub struct BadHeadSlice(String);

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// No built-in model has the name.
    #[error("no model {name:?}; known: {}", BUILT_IN.map(|(known, ..)| known).join(", "))]
    Unknown {
        /// The name asked for.
        name: String,
    },
    /// Its heads do not divide so.
    #[error(
        "the KV cache of {name} cannot be sliced into {}: it has {}",
        .slice.of(),
        .heads.map_or("one latent for all heads".into(), |heads| format!("{heads} heads"))
    )]
    Slice {
        /// The model.
        name: String,
        /// Its KV heads.
        heads: Option<NonZeroU64>,
        /// The slice asked for.
        slice: HeadSlice,
    },
    /// The file cannot be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("{path} is not JSON: {source}", path = .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A field that the cache size depends on is not there.
    #[error("{path}: no field {field}", path = .path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
    },
    /// A field has a value that no model can have.
    #[error("{path}: {field} is {found}, expected {expected}", path = .path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// The value, as JSON.
        found: String,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// The fields are sound one by one, but their product is not.
    #[error("{path}: the bytes of one token overflow 64 bits", path = .path.display())]
    Overflow {
        /// The file.
        path: PathBuf,
    },
}

/// Name, attention layers, bytes per token of each tensor of a layer, KV heads; MLA has none.
const BUILT_IN: [(&str, u64, &[u64], u64); 4] = [
    ("deepseek-v3", 61, &[(512 + 64) * 2], 0),
    ("qwen2.5-7b", 28, &[4 * 128 * 2, 4 * 128 * 2], 4),
    ("qwen3-4b", 36, &[8 * 128 * 2, 8 * 128 * 2], 8),
    ("kimi-k3", 24, &[(512 + 64) * 2], 0),
];

/// Element sizes of the types that a config may name.
const ELEMENT_BYTES: [(&str, u64); 11] = [
    ("bfloat16", 2),
    ("bf16", 2),
    ("float16", 2),
    ("half", 2),
    ("fp16", 2),
    ("float32", 4),
    ("float", 4),
    ("fp32", 4),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("fp8", 1),
];

/// A parsed config.json.
struct Config<'a> {
    path: &'a Path,
    outer: &'a Value,
    /// The language model's part: `text_config` of a multimodal model, else the outer object.
    model: &'a Value,
}

impl Config<'_> {
    fn kv_model(&self) -> Result<KvModel, ModelError> {
        let layers = self.number("num_hidden_layers")?;
        let element_bytes = self.element_bytes()?;
        let (heads, tensors) = match self.optional_number("kv_lora_rank")? {
            Some(latent) => {
                let rope = self.number("qk_rope_head_dim")?;
                let elements = latent.checked_add(rope.get());
                (None, vec![elements.and_then(|elements| elements.checked_mul(element_bytes))])
            }
            None => {
                let heads = match self.optional_number("num_key_value_heads")? {
                    Some(heads) => heads,
                    None => self.number("num_attention_heads")?,
                };
                let head = self.head_elements()?;
                let elements = heads.checked_mul(head);
                let tensor = elements.and_then(|elements| elements.checked_mul(element_bytes));
                (Some(heads), vec![tensor; 2])
            }
        };
        let overflow = || ModelError::Overflow { path: self.path.to_owned() };
        let tensors = tensors.into_iter().collect::<Option<Vec<_>>>().ok_or_else(overflow)?;
        let model = KvModel { name: self.name(), layers, tensors, heads };
        model.bytes_per_token().ok_or_else(overflow)?;
        Ok(model)
    }

    fn head_elements(&self) -> Result<NonZeroU64, ModelError> {
        if let Some(elements) = self.optional_number("head_dim")? {
            return Ok(elements);
        }
        let hidden = self.number("hidden_size")?;
        let heads = self.number("num_attention_heads")?;
        NonZeroU64::new(hidden.get() / heads)
            .filter(|_| hidden.get() % heads == 0)
            .ok_or_else(|| self.value("hidden_size", hidden, "a multiple of num_attention_heads"))
    }

    fn element_bytes(&self) -> Result<NonZeroU64, ModelError> {
        // Older files say torch_dtype; multimodal ones may say it in the outer object only.
        let (field, found) = [self.model, self.outer]
            .into_iter()
            .flat_map(|object| ["dtype", "torch_dtype"].map(|field| (field, object.get(field))))
            .find_map(|(field, found)| Some((field, found.filter(|found| !found.is_null())?)))
            .ok_or_else(|| ModelError::Missing {
                path: self.path.to_owned(),
                field: "torch_dtype",
            })?;
        let named = found.as_str().map(|name| name.strip_prefix("torch.").unwrap_or(name));
        ELEMENT_BYTES
            .iter()
            .find(|(known, _)| Some(*known) == named)
            .and_then(|&(_, bytes)| NonZeroU64::new(bytes))
            .ok_or_else(|| {
                self.value(field, found, "bfloat16, float16, float32, float8_e4m3fn or float8_e5m2")
            })
    }

    fn name(&self) -> String {
        match self.outer.get("model_type").and_then(Value::as_str) {
            Some(name) => name.to_owned(),
            None => self.path.display().to_string(),
        }
    }

    fn number(&self, field: &'static str) -> Result<NonZeroU64, ModelError> {
        self.optional_number(field)?
            .ok_or_else(|| ModelError::Missing { path: self.path.to_owned(), field })
    }

    /// `None` where the field is absent or null.
    fn optional_number(&self, field: &'static str) -> Result<Option<NonZeroU64>, ModelError> {
        match self.model.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(found) => match found.as_u64().and_then(NonZeroU64::new) {
                Some(number) => Ok(Some(number)),
                None => Err(self.value(field, found, "a positive whole number")),
            },
        }
    }

    fn value(
        &self,
        field: &'static str,
        found: impl ToString,
        expected: &'static str,
    ) -> ModelError {
        ModelError::Value { path: self.path.to_owned(), field, found: found.to_string(), expected }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn built_in_models_have_the_bytes_per_token_of_the_requirements() {
        // REQUIREMENTS T9: 70.3 KB, 56 KiB and 27.6 KB a token; qwen3-4b is 36 layers of 8 heads.
        for (name, bytes) in [
            ("deepseek-v3", 70_272),
            ("Qwen2.5-7B", 56 * 1024),
            ("kimi-k3", 27_648),
            ("qwen3-4b", 147_456),
        ] {
            assert_eq!(name.parse::<KvModel>().unwrap().bytes_per_token(), Some(bytes), "{name}");
        }
        for (name, ..) in BUILT_IN {
            assert_eq!(name.parse::<KvModel>().unwrap().name, name);
        }
    }

    #[test]
    fn an_unknown_model_is_refused_with_the_known_ones() {
        assert_eq!(
            "gpt-2".parse::<KvModel>().unwrap_err().to_string(),
            r#"no model "gpt-2"; known: deepseek-v3, qwen2.5-7b, qwen3-4b, kimi-k3"#
        );
    }

    #[test]
    fn a_slice_of_heads_is_read_and_refused_where_the_heads_do_not_divide() {
        let slice: HeadSlice = "3/4".parse().unwrap();
        assert_eq!((slice.index(), slice.of(), slice.to_string().as_str()), (2, 4, "3/4"));
        for bad in ["", "1", "0/4", "5/4", "1/0", "a/4", "1/4/2", "-1/4"] {
            assert_eq!(bad.parse::<HeadSlice>(), Err(BadHeadSlice(bad.into())), "{bad}");
        }
        let refused = |name: &str, slice: &str| {
            let model: KvModel = name.parse().unwrap();
            model.slice_of_heads(slice.parse().unwrap()).map_err(|error| error.to_string())
        };
        assert_eq!(refused("qwen2.5-7b", "3/4"), Ok(slice));
        let heads = "the KV cache of qwen2.5-7b cannot be sliced into 3: it has 4 heads";
        assert_eq!(refused("qwen2.5-7b", "1/3"), Err(heads.into()));
        assert!(refused("deepseek-v3", "1/4").unwrap_err().ends_with("one latent for all heads"));
    }

    #[test]
    fn configs_of_known_models_give_the_built_in_numbers() {
        let qwen25 = r#"{"model_type": "qwen2.5-7b", "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "hidden_size": 3584, "torch_dtype": "bfloat16"}"#;
        let qwen3 = r#"{"model_type": "qwen3-4b", "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2560, "dtype": "torch.bfloat16"}"#;
        let deepseek = r#"{"model_type": "deepseek-v3", "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}"#;
        for config in [qwen25, qwen3, deepseek] {
            let model = read(config).unwrap();
            assert_eq!(model, model.name.parse().unwrap());
        }
    }

    #[test]
    fn a_nested_text_config_is_used_and_may_leave_the_type_outside() {
        let nested = r#"{"model_type": "vision", "torch_dtype": "float32", "hidden_size": 7,
            "text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}}"#;
        let model = read(nested).unwrap();
        assert_eq!(model.name, "vision");
        assert_eq!(model.bytes_per_token(), Some(2 * 2 * 4 * 16 * 4));
    }

    #[test]
    fn every_element_type_has_its_size() {
        for (name, bytes) in ELEMENT_BYTES {
            let config = format!(
                r#"{{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1, "torch_dtype": "{name}"}}"#
            );
            assert_eq!(read(&config).unwrap().bytes_per_token(), Some(2 * bytes), "{name}");
        }
    }

    #[test]
    fn a_bad_config_is_refused_with_the_file_and_the_field() {
        let max = u64::MAX;
        let cases = [
            ("{", "is not JSON: EOF"),
            ("[]", ": no field num_hidden_layers"),
            (r#"{"num_hidden_layers": null}"#, ": no field num_hidden_layers"),
            (
                r#"{"num_hidden_layers": 0}"#,
                ": num_hidden_layers is 0, expected a positive whole number",
            ),
            (
                r#"{"num_hidden_layers": -3}"#,
                ": num_hidden_layers is -3, expected a positive whole number",
            ),
            (
                r#"{"num_hidden_layers": "8"}"#,
                r#": num_hidden_layers is "8", expected a positive whole number"#,
            ),
            (r#"{"num_hidden_layers": 8}"#, ": no field torch_dtype"),
            (
                r#"{"num_hidden_layers": 8, "dtype": "int3"}"#,
                r#": dtype is "int3", expected bfloat16"#,
            ),
            (r#"{"num_hidden_layers": 8, "dtype": "bf16"}"#, ": no field num_attention_heads"),
            (
                r#"{"num_hidden_layers": 8, "dtype": "bf16", "kv_lora_rank": 512}"#,
                ": no field qk_rope_head_dim",
            ),
            (
                r#"{"num_hidden_layers": 8, "dtype": "bf16", "num_attention_heads": 3, "hidden_size": 64}"#,
                ": hidden_size is 64, expected a multiple of num_attention_heads",
            ),
            (
                r#"{"num_hidden_layers": 8, "dtype": "bf16", "num_attention_heads": 3, "hidden_size": 2}"#,
                ": hidden_size is 2, expected a multiple of num_attention_heads",
            ),
            (
                &format!(
                    r#"{{"num_hidden_layers": {max}, "dtype": "fp8", "num_attention_heads": 1, "head_dim": 1}}"#
                ),
                ": the bytes of one token overflow 64 bits",
            ),
            (
                &format!(
                    r#"{{"num_hidden_layers": 1, "dtype": "fp8", "kv_lora_rank": {max}, "qk_rope_head_dim": 1}}"#
                ),
                ": the bytes of one token overflow 64 bits",
            ),
        ];
        for (config, expected) in cases {
            let message = read(config).unwrap_err().to_string();
            assert!(
                message.contains("kvferry-model") && message.contains(expected),
                "{config}: {message}"
            );
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let message =
            KvModel::from_config(Path::new("/nowhere/config.json")).unwrap_err().to_string();
        assert!(message.starts_with("cannot read /nowhere/config.json: "), "{message}");
    }

    fn read(config: &str) -> Result<KvModel, ModelError> {
        let mut file = tempfile::Builder::new().prefix("kvferry-model").tempfile().unwrap();
        file.write_all(config.as_bytes()).unwrap();
        KvModel::from_config(file.path())
    }
}
