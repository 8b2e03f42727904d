//! Requests about texts that get no answer: `/v1/rerank`, as servers of rerankers have it, and `/v1/embeddings`.

use std::sync::Arc;

use super::fields::Fields;
use super::{Interface, Options, Prompt, Request, RequestLimits, Wanted};
use crate::error::ApiError;

/// How the results are given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    /// Of a ranking: how many of the best are wanted; `None`: all.
    pub top_n: Option<usize>,
    /// Of a ranking: the documents, if they are wanted beside their scores.
    pub documents: Vec<String>,
    /// Whether vectors are given as the bytes of f32 in base64.
    pub are_base64: bool,
}

/// The query and the documents of a ranking.
pub(super) fn rerank(mut fields: Fields, limits: &RequestLimits) -> Result<Request, ApiError> {
    let query = fields.text("query")?.filter(|query| !query.trim().is_empty());
    let query: Arc<str> = query.ok_or_else(|| ApiError::parameter("query", "expected a text, got none"))?.into();
    let documents = fields.documents(limits)?;
    let top_n = fields.count("top_n", 1, usize::MAX)?;
    let returns = fields.truth("return_documents")?;
    let results = Results { top_n, documents: if returns { documents.clone() } else { Vec::new() }, are_base64: false };
    let prompts = documents.into_iter().map(|document| Prompt::Pair(Arc::clone(&query), document)).collect();
    request(Interface::Rerank, fields, (prompts, results), Wanted::Score)
}

/// The texts whose vectors are wanted.
pub(super) fn embeddings(mut fields: Fields, limits: &RequestLimits) -> Result<Request, ApiError> {
    let prompts = fields.prompts("input", limits.texts, limits)?;
    let are_base64 = match fields.text("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(ApiError::parameter("encoding_format", "expected float or base64")),
    };
    let dimensions = fields.count("dimensions", 1, usize::MAX)?;
    request(
        Interface::Embeddings,
        fields,
        (prompts, Results { are_base64, ..Results::default() }),
        Wanted::Vector(dimensions),
    )
}

fn request(
    interface: Interface,
    mut fields: Fields,
    (prompts, results): (Vec<Prompt>, Results),
    wanted: Wanted,
) -> Result<Request, ApiError> {
    let model = fields.text("model")?;
    fields.end()?;
    let options = Options { n: 1, max_tokens: Some(1), wanted, ..Options::default() };
    Ok(Request { interface, model, prompts, options, stream: false, include_usage: false, labels: Vec::new(), results })
}
