//! Stores that are services: their addresses on the command line, and opening them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use sapwood::backend::store::Store;

/// A service that keeps pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum StoreUrl {
    /// `mooncake://IP:PORT`, the real client on this node.
    Mooncake(SocketAddr),
    /// `redis://HOST:PORT`.
    Redis(String),
    /// `redis:///PATH`, a socket file.
    RedisSocket(PathBuf),
    /// `s3://BUCKET?endpoint=..&region=..&prefix=..`; credentials come from the environment.
    S3 { bucket: String, endpoint: Option<String>, region: Option<String>, prefix: Option<String> },
}

/// Why an address is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadUrl {
    #[error("mooncake:// needs IP:PORT")]
    Mooncake,
    #[error("redis:// needs HOST:PORT or /PATH of a socket")]
    Redis,
    #[error("s3:// needs the name of a bucket")]
    Bucket,
    #[error("s3:// knows endpoint, region and prefix, not {0:?}")]
    Parameter(String),
    #[error("this build lacks the feature {0}")]
    Feature(&'static str),
}

/// Why a service can not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServiceError {
    #[cfg(feature = "mooncake")]
    #[error(transparent)]
    Mooncake(#[from] sapwood::backend::store::mooncake::MooncakeError),
    #[cfg(any(feature = "redis", feature = "object"))]
    #[error(transparent)]
    Store(#[from] sapwood::backend::store::StoreError),
    #[cfg(not(all(feature = "mooncake", feature = "redis", feature = "object")))]
    #[error("this build lacks the feature {0}")]
    Feature(&'static str),
}

impl StoreUrl {
    /// Reads an address; `None` if it has no scheme of a service.
    pub(crate) fn parse(text: &str) -> Option<Result<StoreUrl, BadUrl>> {
        let (scheme, rest) = text.split_once("://")?;
        let (parsed, feature, built) = match scheme {
            "mooncake" => (mooncake(rest), "mooncake", cfg!(feature = "mooncake")),
            "redis" => (redis(rest), "redis", cfg!(feature = "redis")),
            "s3" => (s3(rest), "object", cfg!(feature = "object")),
            _ => return None,
        };
        Some(parsed.and_then(|url| if built { Ok(url) } else { Err(BadUrl::Feature(feature)) }))
    }

    /// Connects. Small pages are grouped where that makes a service faster (`docs/performance/store.md`).
    pub(crate) fn open(&self) -> Result<Arc<dyn Store>, ServiceError> {
        match self {
            StoreUrl::Mooncake(address) => open_mooncake(*address),
            StoreUrl::Redis(_) | StoreUrl::RedisSocket(_) => open_redis(self),
            StoreUrl::S3 { .. } => open_s3(self),
        }
    }
}

fn mooncake(rest: &str) -> Result<StoreUrl, BadUrl> {
    rest.parse().map(StoreUrl::Mooncake).map_err(|_| BadUrl::Mooncake)
}

fn redis(rest: &str) -> Result<StoreUrl, BadUrl> {
    if rest.starts_with('/') && rest.len() > 1 {
        return Ok(StoreUrl::RedisSocket(rest.into()));
    }
    let (host, port) = rest.rsplit_once(':').ok_or(BadUrl::Redis)?;
    let fine = !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|p| p > 0);
    if fine { Ok(StoreUrl::Redis(rest.to_owned())) } else { Err(BadUrl::Redis) }
}

fn s3(rest: &str) -> Result<StoreUrl, BadUrl> {
    let (bucket, parameters) = rest.split_once('?').unwrap_or((rest, ""));
    if bucket.is_empty() || bucket.contains('/') {
        return Err(BadUrl::Bucket);
    }
    let (mut endpoint, mut region, mut prefix) = (None, None, None);
    for parameter in parameters.split('&').filter(|p| !p.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let slot = match name {
            "endpoint" => &mut endpoint,
            "region" => &mut region,
            "prefix" => &mut prefix,
            _ => return Err(BadUrl::Parameter(name.to_owned())),
        };
        *slot = Some(value.to_owned());
    }
    Ok(StoreUrl::S3 { bucket: bucket.to_owned(), endpoint, region, prefix })
}

#[cfg(feature = "mooncake")]
fn open_mooncake(address: SocketAddr) -> Result<Arc<dyn Store>, ServiceError> {
    use sapwood::backend::store::group::{Grouped, Names};
    use sapwood::backend::store::mooncake::{MooncakeConfig, MooncakeStore};
    let store = MooncakeStore::open(MooncakeConfig::at(address))?;
    // The cache asks for chains of pages from where it knows them, so a link for the first of a group is enough.
    Ok(Arc::new(Grouped::new(store).with_names(Names::FirstPage)))
}

#[cfg(not(feature = "mooncake"))]
fn open_mooncake(_: SocketAddr) -> Result<Arc<dyn Store>, ServiceError> {
    Err(ServiceError::Feature("mooncake"))
}

#[cfg(feature = "redis")]
fn open_redis(url: &StoreUrl) -> Result<Arc<dyn Store>, ServiceError> {
    use sapwood::backend::store::redis::{RedisAddress, RedisConfig, RedisStore};
    let address = match url {
        StoreUrl::RedisSocket(path) => RedisAddress::Unix(path.clone()),
        StoreUrl::Redis(address) => RedisAddress::Tcp(address.clone()),
        StoreUrl::Mooncake(_) | StoreUrl::S3 { .. } => RedisAddress::Tcp(String::new()),
    };
    Ok(Arc::new(RedisStore::open(RedisConfig::new(address))?))
}

#[cfg(not(feature = "redis"))]
fn open_redis(_: &StoreUrl) -> Result<Arc<dyn Store>, ServiceError> {
    Err(ServiceError::Feature("redis"))
}

#[cfg(feature = "object")]
fn open_s3(url: &StoreUrl) -> Result<Arc<dyn Store>, ServiceError> {
    use sapwood::backend::store::group::Grouped;
    use sapwood::backend::store::object::{BucketStore, ObjectConfig};
    let mut config = ObjectConfig::new("");
    if let StoreUrl::S3 { bucket, endpoint, region, prefix } = url {
        config.bucket.clone_from(bucket);
        config.allow_http = endpoint.as_deref().is_some_and(|e| e.starts_with("http://"));
        config.endpoint.clone_from(endpoint);
        config.region = region.clone().unwrap_or(config.region);
        config.prefix = prefix.clone().unwrap_or(config.prefix);
    }
    // A request for a name that is not there is the dearest one, so every page has a link.
    Ok(Arc::new(Grouped::new(BucketStore::open(config)?)))
}

#[cfg(not(feature = "object"))]
fn open_s3(_: &StoreUrl) -> Result<Arc<dyn Store>, ServiceError> {
    Err(ServiceError::Feature("object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused_with_a_reason() {
        let address = "127.0.0.1:50052";
        assert_eq!(mooncake(address).unwrap(), StoreUrl::Mooncake(address.parse().unwrap()));
        for bad in ["", "localhost:1", "127.0.0.1", "127.0.0.1:70000", "127.0.0.1:1/x"] {
            assert!(matches!(mooncake(bad), Err(BadUrl::Mooncake)), "{bad}");
        }
        assert_eq!(redis("host:6379").unwrap(), StoreUrl::Redis("host:6379".into()));
        assert_eq!(redis("/run/redis.sock").unwrap(), StoreUrl::RedisSocket("/run/redis.sock".into()));
        for bad in ["", "/", "host", ":6379", "host:", "host:0", "host:99999", "user@host/1:2"] {
            assert!(matches!(redis(bad), Err(BadUrl::Redis)), "{bad}");
        }
        let url = s3("pages?endpoint=http://127.0.0.1:9000&prefix=a&region=eu").unwrap();
        let text = |s: &str| Some(s.to_owned());
        let want = StoreUrl::S3 {
            bucket: "pages".into(),
            endpoint: text("http://127.0.0.1:9000"),
            region: text("eu"),
            prefix: text("a"),
        };
        assert_eq!(url, want);
        assert!(matches!(s3("pages"), Ok(StoreUrl::S3 { endpoint: None, .. })));
        for bad in ["", "?endpoint=x", "a/b"] {
            assert!(matches!(s3(bad), Err(BadUrl::Bucket)), "{bad}");
        }
        assert!(matches!(s3("b?secret=x"), Err(BadUrl::Parameter(name)) if name == "secret"));
        for path in ["/tmp/x", "tmp", "ftp://x"] {
            assert!(StoreUrl::parse(path).is_none(), "{path}");
        }
    }

    #[test]
    fn a_service_that_was_not_built_in_is_named() {
        let refused = |url: &str| matches!(StoreUrl::parse(url), Some(Err(BadUrl::Feature(_))));
        assert_eq!(refused("mooncake://127.0.0.1:1"), !cfg!(feature = "mooncake"));
        assert_eq!(refused("redis://127.0.0.1:1"), !cfg!(feature = "redis"));
        assert_eq!(refused("s3://pages"), !cfg!(feature = "object"));
    }
}
