//! Pages in an S3 bucket: one sealed object per page.
//!
//! An object is `PREFIX/` namespace tag `/` rest of the key, both in hex, so that a namespace can be listed. An
//! object that fails its checks is moved to `PREFIX/bad/`.
//!
//! The client is asynchronous; it runs on one thread of this store, which nobody else sees. Requests of a
//! batch run concurrently. Bytes pass through buffers of the client and are copied to their pages by the
//! calling thread, so a call can return at its deadline whatever the far side does.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore as _, ObjectStoreExt as _, PutMode, PutPayload, RetryConfig};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::batch::{Call, Item, Outcome};
use super::envelope::{HEADER_BYTES, Header};
use super::gate::{Gate, locked};
use super::regions::{HeldSpans, RegionToken, Regions, RegisterError};
use super::sealed::{outcome_of, seal, unseal};
use super::stats::{Counters, Health, OpKind, StoreStats};
use super::{ArenaNeed, Caps, Overwrite, Store, StoreEpoch, StoreError, TransportCause};
use crate::backend::identity::{NamespaceDigest, StoreKey};
use crate::backend::region::Region;

/// Configuration of an object store.
#[derive(Clone, Debug)]
pub struct ObjectConfig {
    /// Bucket; S3 refuses names of less than three characters.
    pub bucket: String,
    /// First part of every object's name: letters, digits, `.`, `-`, `_`; at most 64.
    pub prefix: String,
    /// Endpoint, for servers other than Amazon's.
    pub endpoint: Option<String>,
    /// Region.
    pub region: String,
    /// Access key and secret; without them the environment is asked, as Amazon's tools do.
    pub credentials: Option<(String, String)>,
    /// Plain HTTP is allowed.
    pub allow_http: bool,
    /// Requests of one batch in flight.
    pub concurrency: usize,
    /// Bound on a call that has no deadline of its own.
    pub call_max: Duration,
    /// Repeats of a failed request within the client.
    pub retries_max: usize,
}

impl ObjectConfig {
    /// Defaults for a bucket.
    #[must_use]
    pub fn new(bucket: impl Into<String>) -> ObjectConfig {
        ObjectConfig {
            bucket: bucket.into(),
            prefix: "sapwood".into(),
            endpoint: None,
            region: "us-east-1".into(),
            credentials: None,
            allow_http: false,
            concurrency: 16,
            call_max: Duration::from_secs(60),
            retries_max: 2,
        }
    }
}

/// The client's thread.
#[derive(Debug)]
struct Runner {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Runner {
    fn start() -> std::io::Result<Runner> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let work = move || {
            // Either way the store is gone.
            let _ = runtime.block_on(stopped);
        };
        let thread = std::thread::Builder::new().name("store-object".into()).spawn(work)?;
        Ok(Runner { handle, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It only runs tasks, whose panics the runtime catches.
            let _ = thread.join();
        }
    }
}

/// A store in a bucket. See the module.
#[derive(Debug)]
pub struct BucketStore {
    config: ObjectConfig,
    client: Arc<AmazonS3>,
    runner: Mutex<Option<Runner>>,
    regions: Regions,
    counters: Counters,
    gate: Gate,
    up: AtomicBool,
}

/// What came back for an item.
enum Answer {
    /// Over, with nothing to check.
    Over(Outcome),
    /// The bytes of the object.
    Whole(Vec<u8>),
    /// The object has another size; its first bytes.
    Other { size: u64, head: Vec<u8> },
}

type Client = Arc<AmazonS3>;

impl BucketStore {
    /// Starts the client and asks the bucket for an object that is not there, to find out whether it answers.
    pub fn open(config: ObjectConfig) -> Result<BucketStore, StoreError> {
        let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if config.prefix.is_empty() || config.prefix.len() > 64 || !config.prefix.chars().all(fine) {
            let source = std::io::Error::from_raw_os_error(libc::EINVAL);
            return Err(StoreError::Io { op: "check the prefix", source });
        }
        let remote = |op, e: &object_store::Error| StoreError::Remote { op, cause: cause_of(e) };
        let client = client_of(&config).map_err(|e| remote("configure the client", &e))?;
        let runner = Runner::start().map_err(|source| StoreError::Io { op: "start the client", source })?;
        let store = BucketStore {
            config,
            client: Arc::new(client),
            runner: Mutex::new(Some(runner)),
            regions: Regions::default(),
            counters: Counters::default(),
            gate: Gate::default(),
            up: AtomicBool::new(true),
        };
        let probe = store.path(&StoreKey::from_bytes([0; 32]));
        let client = Arc::clone(&store.client);
        let found = store.one(&Call::unbounded(), async move {
            match client.head(&probe).await {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(e) => Err(e),
            }
        })?;
        found.map_err(|e| remote("open the bucket", &e))?;
        Ok(store)
    }

    fn path(&self, key: &StoreKey) -> Path {
        let hex = key.hex();
        Path::from(format!("{}/{}/{}", self.config.prefix, &hex[..16], &hex[16..]))
    }

    fn handle(&self) -> Option<Handle> {
        locked(&self.runner).as_ref().map(|r| r.handle.clone())
    }

    fn deadline(&self, call: &Call) -> Instant {
        let ours = Instant::now() + self.config.call_max;
        call.deadline.map_or(ours, |theirs| theirs.min(ours))
    }

    /// Runs one future on the client's thread and waits for it.
    fn one<T: Send + 'static>(
        &self,
        call: &Call,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let handle = self.handle().ok_or(StoreError::Closed)?;
        let (tx, rx) = crossbeam_channel::bounded(1);
        let task = handle.spawn(async move {
            // Nobody waits any more.
            let _ = tx.send(work.await);
        });
        self.wait(&rx, call).map_err(|stopped| {
            task.abort();
            if stopped == Outcome::Cancelled { StoreError::Cancelled } else { StoreError::Timeout }
        })
    }

    /// The next message, or why there will be none in time.
    fn wait<T>(&self, rx: &Receiver<T>, call: &Call) -> Result<T, Outcome> {
        // The flag of a call has no bell: it is looked at so often.
        const LOOK: Duration = Duration::from_millis(20);
        let deadline = self.deadline(call);
        loop {
            match rx.recv_deadline(deadline.min(Instant::now() + LOOK)) {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Outcome::Transport(TransportCause::Disconnected));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(stopped) = call.stopped() {
                        return Err(stopped);
                    }
                    if Instant::now() >= deadline {
                        return Err(Outcome::Timeout);
                    }
                }
            }
        }
    }

    /// Runs a batch: `request` makes the future of an item or its outcome, `settle` makes the outcome of its
    /// answer, on this thread.
    fn batch<T, F>(
        &self,
        op: OpKind,
        of: &[T],
        call: &Call,
        request: impl Fn(&T) -> Result<F, Outcome>,
        settle: impl Fn(&T, Answer) -> Outcome,
    ) -> Vec<Outcome>
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let closed = || vec![Outcome::Closed; of.len()];
        let Some(_inside) = self.gate.enter() else { return closed() };
        let Some(handle) = self.handle() else { return closed() };
        let mut out = vec![None; of.len()];
        let mut requests = Vec::new();
        for (i, x) in of.iter().enumerate() {
            match call.stopped().map_or_else(|| request(x), Err) {
                Ok(future) => requests.push((i, future)),
                Err(outcome) => out[i] = Some(outcome),
            }
        }
        let expected = requests.len();
        let (tx, rx) = crossbeam_channel::unbounded();
        let driver = handle.spawn(drive(requests, self.config.concurrency.max(1), tx));
        for _ in 0..expected {
            match self.wait(&rx, call) {
                Ok((i, answer)) => out[i] = Some(settle(&of[i], answer)),
                Err(why) => {
                    driver.abort();
                    out.iter_mut().filter(|o| o.is_none()).for_each(|o| *o = Some(why));
                    break;
                }
            }
        }
        let lost = Outcome::Transport(TransportCause::Disconnected);
        let out: Vec<_> = out.into_iter().map(|o| o.unwrap_or(lost)).collect();
        if expected > 0 {
            self.up.store(!out.iter().all(|o| o.is_store_failure()), Relaxed);
        }
        self.counters.count(op, &out);
        out
    }

    fn put_aside(&self, key: &StoreKey) {
        tracing::warn!(?key, "an object failed its checks and was put aside");
        let (client, from) = (Arc::clone(&self.client), self.path(key));
        let to = Path::from(format!("{}/bad/{}", self.config.prefix, key.hex()));
        // Failing leaves it where it is: it is found, and put aside, again.
        let _ = self.one(&Call::within(self.config.call_max), async move { client.rename(&from, &to).await });
    }
}

fn client_of(config: &ObjectConfig) -> Result<AmazonS3, object_store::Error> {
    let mut b = match &config.credentials {
        Some((id, secret)) => AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret),
        None => AmazonS3Builder::from_env(),
    };
    if let Some(endpoint) = &config.endpoint {
        b = b.with_endpoint(endpoint);
    }
    let retry = RetryConfig {
        max_retries: config.retries_max,
        retry_timeout: config.call_max,
        ..RetryConfig::default()
    };
    let options = ClientOptions::new().with_timeout(config.call_max).with_allow_http(config.allow_http);
    b.with_bucket_name(&config.bucket)
        .with_region(&config.region)
        .with_client_options(options)
        .with_allow_http(config.allow_http)
        .with_retry(retry)
        // Keys are deleted one by one; small servers do not know the bulk request.
        .with_disable_bulk_delete(true)
        .build()
}

/// Keeps so many requests in flight until all are answered or nobody listens.
async fn drive<F: Future<Output = Answer> + Send + 'static>(
    requests: Vec<(usize, F)>,
    concurrency: usize,
    answers: crossbeam_channel::Sender<(usize, Answer)>,
) {
    let mut waiting = requests.into_iter();
    let mut flying = JoinSet::new();
    loop {
        while flying.len() < concurrency
            && let Some((i, request)) = waiting.next()
        {
            flying.spawn(async move { (i, request.await) });
        }
        match flying.join_next().await {
            Some(Ok(answer)) => {
                if answers.send(answer).is_err() {
                    return;
                }
            }
            // A request that panicked is missing from the answers, and ends as lost.
            Some(Err(_)) => {}
            None => return,
        }
    }
}

async fn fetch(client: Client, path: Path, want: u64) -> Answer {
    let fetched = async {
        let found = client.get(&path).await?;
        let size = found.meta.size;
        if size == want {
            return Ok(Answer::Whole(found.bytes().await?.into()));
        }
        drop(found);
        let head = if size == 0 {
            Vec::new()
        } else {
            client.get_range(&path, 0..size.min(HEADER_BYTES as u64)).await?.into()
        };
        Ok(Answer::Other { size, head })
    };
    fetched.await.unwrap_or_else(|e| Answer::Over(outcome(&e)))
}

/// Writes an object unless one of the same size is there: a key names its content, so what is there is what
/// would be written.
async fn store(client: Client, path: Path, sealed: PutPayload, present: Arc<Counters>) -> Answer {
    let len = sealed.content_length();
    let payload = len.saturating_sub(HEADER_BYTES);
    let written = async {
        match client.put_opts(&path, sealed.clone(), PutMode::Create.into()).await {
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
                match client.head(&path).await {
                    Ok(meta) if meta.size == len as u64 => {
                        present.put_present.fetch_add(1, Relaxed);
                        Ok(())
                    }
                    // Of another size, or removed meanwhile.
                    Ok(_) | Err(object_store::Error::NotFound { .. }) => {
                        client.put(&path, sealed).await.map(drop)
                    }
                    Err(e) => Err(e),
                }
            }
            // A server without conditional writes.
            Err(object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. }) => {
                client.put(&path, sealed).await.map(drop)
            }
            result => result.map(drop),
        }
    };
    Answer::Over(written.await.map_or_else(|e| outcome(&e), |()| Outcome::Ok(payload)))
}

async fn length(client: Client, path: Path) -> Answer {
    Answer::Over(match client.head(&path).await {
        Ok(meta) => {
            Outcome::Ok(usize::try_from(meta.size).unwrap_or(usize::MAX).saturating_sub(HEADER_BYTES))
        }
        Err(e) => outcome(&e),
    })
}

async fn delete(client: Client, path: Path) -> Answer {
    let Answer::Over(found) = length(Arc::clone(&client), path.clone()).await else {
        return Answer::Over(Outcome::Missing);
    };
    Answer::Over(match found {
        Outcome::Ok(_) => client.delete(&path).await.map_or_else(|e| outcome(&e), |()| found),
        other => other,
    })
}

/// Deletes what is of the namespace below its tag. The tag found it; the digest in the header decides.
async fn clear(client: Client, below: Path, namespace: NamespaceDigest) -> Result<u64, object_store::Error> {
    let mut removed = 0;
    for meta in client.list_with_delimiter(Some(&below)).await?.objects {
        let head = if meta.size < HEADER_BYTES as u64 {
            Vec::new()
        } else {
            match client.get_range(&meta.location, 0..HEADER_BYTES as u64).await {
                Ok(bytes) => bytes.into(),
                Err(object_store::Error::NotFound { .. }) => continue,
                Err(e) => return Err(e),
            }
        };
        if Header::decode(&head).map_or(true, |h| h.space.is_cleared_with(&h.key, &namespace)) {
            client.delete(&meta.location).await?;
            removed += 1;
        }
    }
    Ok(removed)
}

fn cause_of(e: &object_store::Error) -> TransportCause {
    match e {
        object_store::Error::Unauthenticated { .. } => TransportCause::Remote(401),
        object_store::Error::PermissionDenied { .. } => TransportCause::Remote(403),
        object_store::Error::NotFound { .. } => TransportCause::Remote(404),
        _ => TransportCause::Remote(0),
    }
}

fn outcome(e: &object_store::Error) -> Outcome {
    match e {
        object_store::Error::NotFound { .. } => Outcome::Missing,
        _ => {
            tracing::debug!(error = %e, "request failed");
            Outcome::Transport(cause_of(e))
        }
    }
}

fn settled(answer: Answer) -> Outcome {
    match answer {
        Answer::Over(outcome) => outcome,
        // Only `fetch` answers so.
        Answer::Whole(_) | Answer::Other { .. } => Outcome::Transport(TransportCause::Protocol),
    }
}

fn received(item: &Item, memory: &HeldSpans, answer: Answer) -> Outcome {
    match answer {
        Answer::Over(outcome) => outcome,
        Answer::Whole(bytes) => unseal(&bytes, item, memory),
        Answer::Other { size, head } => {
            let payload = size.saturating_sub(HEADER_BYTES as u64);
            let checked = Header::decode(&head).and_then(|h| h.check(&item.key, &item.space).map(|()| h));
            match checked {
                Err(defect) => outcome_of(defect),
                Ok(h) if h.payload_bytes != payload => Outcome::Corrupt,
                Ok(_) => Outcome::SizeMismatch { stored: usize::try_from(payload).unwrap_or(usize::MAX) },
            }
        }
    }
}

impl Store for BucketStore {
    fn caps(&self) -> Caps {
        Caps {
            name: "object",
            zero_copy: false,
            align: 1,
            object_bytes_efficient: 1 << 20,
            object_bytes_max: (5 << 30) - HEADER_BYTES,
            batch_items_efficient: self.config.concurrency,
            overwrite: Overwrite::KeepsOld,
            lease: None,
            evicts: false,
            durable: true,
            shared: true,
            arena: ArenaNeed::AnyMemory,
        }
    }

    fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let _inside = self.gate.enter().ok_or(RegisterError::Closed)?;
        Ok(self.regions.register(region))
    }

    fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.regions.unregister(token)
    }

    fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let request = |key: &StoreKey| Ok(length(Arc::clone(&self.client), self.path(key)));
        self.batch(OpKind::Query, keys, call, request, |_, answer| settled(answer))
    }

    fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let request = |item: &Item| {
            let memory = self.regions.resolve(&item.spans)?;
            let want = (HEADER_BYTES + memory.len()) as u64;
            Ok(fetch(Arc::clone(&self.client), self.path(&item.key), want))
        };
        let settle = |item: &Item, answer| match self.regions.resolve(&item.spans) {
            Ok(memory) => received(item, &memory, answer),
            Err(lost) => lost,
        };
        let out = self.batch(OpKind::Get, items, call, request, settle);
        let bad = items.iter().zip(&out).filter(|(_, o)| **o == Outcome::Corrupt);
        bad.for_each(|(item, _)| self.put_aside(&item.key));
        out
    }

    fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
        let counters = Arc::new(Counters::default());
        let request = |item: &Item| {
            let memory = self.regions.resolve(&item.spans)?;
            let sealed = PutPayload::from(seal(item, &memory));
            Ok(store(Arc::clone(&self.client), self.path(&item.key), sealed, Arc::clone(&counters)))
        };
        let out = self.batch(OpKind::Put, items, call, request, |_, answer| settled(answer));
        self.counters.put_present.fetch_add(counters.put_present.load(Relaxed), Relaxed);
        out
    }

    fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let request = |key: &StoreKey| Ok(delete(Arc::clone(&self.client), self.path(key)));
        self.batch(OpKind::Remove, keys, call, request, |_, answer| settled(answer))
    }

    fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
        let _inside = self.gate.enter().ok_or(StoreError::Closed)?;
        let tag: String = namespace.tag().iter().map(|b| format!("{b:02x}")).collect();
        let below = Path::from(format!("{}/{tag}", self.config.prefix));
        let cleared = self.one(call, clear(Arc::clone(&self.client), below, namespace))?;
        let removed = cleared.map_err(|e| StoreError::Remote { op: "clear", cause: cause_of(&e) })?;
        self.counters.removed.fetch_add(removed, Relaxed);
        Ok(removed)
    }

    fn sync(&self, _call: &Call) -> Result<(), StoreError> {
        self.gate.enter().map(drop).ok_or(StoreError::Closed)
    }

    fn health(&self) -> Health {
        match (self.gate.is_closed(), self.up.load(Relaxed)) {
            (true, _) => Health::Closed,
            (false, true) => Health::Up,
            (false, false) => Health::Down,
        }
    }

    fn stats(&self) -> StoreStats {
        self.counters.snapshot()
    }

    fn epoch(&self) -> StoreEpoch {
        StoreEpoch(1)
    }

    fn close(&self, deadline: Instant) -> Result<(), StoreError> {
        self.gate.close(deadline)?;
        self.regions.clear();
        *locked(&self.runner) = None;
        Ok(())
    }
}
