//! The stores that are servers: what they do when the far side tampers, restarts, fills up or is not there.

use crate::kit::{Fixture, skip};

#[cfg(not(feature = "redis"))]
pub(crate) fn redis_fixture(_socket: bool) -> Option<Fixture> {
    skip("the feature redis");
    None
}

#[cfg(not(feature = "object"))]
pub(crate) fn bucket_fixture() -> Option<Fixture> {
    skip("the feature object");
    None
}

#[cfg(feature = "redis")]
pub(crate) use redis::fixture as redis_fixture;

#[cfg(feature = "object")]
pub(crate) use bucket::fixture as bucket_fixture;

#[cfg(feature = "redis")]
mod redis {
    use std::io::{Read as _, Write as _};
    use std::slice::from_ref;
    use std::time::{Duration, Instant};

    use sapwood::backend::store::redis::{RedisAddress, RedisConfig, RedisStore};
    use sapwood::backend::store::{Call, Health, Outcome, Store, StoreError, TransportCause};

    use super::{Fixture, skip};
    use crate::kit::{Arena, bytes_of, item, key};
    use crate::services::{Server, fresh_name, redis, start_redis};

    fn config(server: &Server, socket: bool) -> RedisConfig {
        let address = if socket {
            RedisAddress::Unix(server.socket())
        } else {
            RedisAddress::Tcp(format!("127.0.0.1:{}", server.port))
        };
        RedisConfig {
            prefix: fresh_name("test"),
            call_max: Duration::from_secs(60),
            ..RedisConfig::new(address)
        }
    }

    pub(crate) fn fixture(socket: bool) -> Option<Fixture> {
        let Some(server) = redis() else {
            skip("redis-server");
            return None;
        };
        let store = RedisStore::open(config(&server, socket)).unwrap();
        Some(Fixture::new(store).keeping(server))
    }

    const LEN: usize = 10_000;

    /// Sends one command as a line and returns the first part of the answer.
    fn say(server: &Server, line: &str) -> String {
        let mut link = std::os::unix::net::UnixStream::connect(server.socket()).unwrap();
        link.write_all(format!("{line}\r\n").as_bytes()).unwrap();
        let mut answer = [0; 256];
        let n = link.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..n]).into_owned()
    }

    #[test]
    fn tampered_values_are_misses_and_put_aside() {
        let Some(server) = redis() else { return skip("redis-server") };
        let c = config(&server, true);
        let store = RedisStore::open(c.clone()).unwrap();
        let a = Arena::new(&store, LEN);
        let name = |n| format!("{}:{}", c.prefix, key(n).hex());
        for (n, change) in
            (0..).zip(["SETRANGE K 5000 x", "SETRANGE K 40 x", "APPEND K x", "SET K x", "SETRANGE K 0 y"])
        {
            a.write(0, &bytes_of(n, LEN));
            let item = item(n, a.span(0, LEN));
            assert_eq!(store.put(from_ref(&item), &Call::unbounded()), [Outcome::Ok(LEN)]);
            let answer = say(&server, &change.replace('K', &name(n)));
            assert!(answer.starts_with(':') || answer.starts_with('+'), "{answer}");
            assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Corrupt], "{change}");
            assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Missing], "{change}");
            let aside = say(&server, &format!("EXISTS {}:bad:{}", c.prefix, key(n).hex()));
            assert_eq!(aside, ":1\r\n", "{change}");
        }
        assert_eq!(store.stats().corrupt_total, 5);
    }

    #[test]
    fn a_restarted_server_is_a_new_epoch() {
        let Some(mut server) = start_redis() else { return skip("redis-server") };
        let store = RedisStore::open(config(&server, true)).unwrap();
        let a = Arena::new(&store, LEN);
        a.write(0, &bytes_of(1, LEN));
        let item = item(1, a.span(0, LEN));
        assert_eq!(store.put(from_ref(&item), &Call::unbounded()), [Outcome::Ok(LEN)]);
        let epoch = store.epoch();
        let socket = server.socket();
        server.kill();
        let gone = Outcome::Transport(TransportCause::Disconnected);
        assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [gone]);
        assert_eq!(store.put(from_ref(&item), &Call::unbounded()), [gone]);
        assert_eq!((store.health(), store.epoch()), (Health::Down, epoch));
        // Another server takes the place of the first, on the same socket.
        std::fs::remove_file(&socket).unwrap();
        let Some(second) = start_redis() else { return skip("redis-server") };
        std::os::unix::fs::symlink(second.socket(), &socket).unwrap();
        assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Missing]);
        assert!(store.epoch() > epoch);
        assert_eq!(store.health(), Health::Up);
        assert_eq!(store.put(from_ref(&item), &Call::unbounded()), [Outcome::Ok(LEN)]);
    }

    #[test]
    fn a_full_server_is_no_space_item_by_item() {
        let Some(server) = start_redis() else { return skip("redis-server") };
        let store = RedisStore::open(config(&server, true)).unwrap();
        let a = Arena::new(&store, 4 << 20);
        assert_eq!(say(&server, "CONFIG SET maxmemory 8mb"), "+OK\r\n");
        let items: Vec<_> = (0..10).map(|n| item(n, a.span(0, 1 << 20))).collect();
        let out = store.put(&items, &Call::unbounded());
        assert!(out[0].is_ok(), "{out:?}");
        assert!(out.contains(&Outcome::NoSpace), "{out:?}");
        let stored = out.iter().filter(|o| o.is_ok()).count();
        let got = store.get(&items, &Call::unbounded());
        for (put, got) in out.iter().zip(&got) {
            assert_eq!(*got, if put.is_ok() { Outcome::Ok(1 << 20) } else { Outcome::Missing });
        }
        assert_eq!(store.stats().no_space_total as usize, items.len() - stored);
    }

    #[test]
    fn a_server_that_stops_answering_is_a_timeout() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = RedisAddress::Tcp(listener.local_addr().unwrap().to_string());
        let c = RedisConfig { call_max: Duration::from_millis(30), ..RedisConfig::new(address) };
        assert!(matches!(RedisStore::open(c), Err(StoreError::Timeout)));
    }

    #[test]
    fn a_server_that_talks_nonsense_is_a_protocol_failure() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = RedisAddress::Tcp(listener.local_addr().unwrap().to_string());
        let talker = std::thread::spawn(move || {
            let (mut link, _) = listener.accept().unwrap();
            link.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            let mut rest = [0; 64];
            let _ = link.read(&mut rest);
        });
        let refused = RedisStore::open(RedisConfig::new(address));
        let want = TransportCause::Protocol;
        assert!(matches!(refused, Err(StoreError::Remote { cause, .. }) if cause == want), "{refused:?}");
        talker.join().unwrap();
    }

    #[test]
    fn nobody_there_and_bad_prefixes_are_errors() {
        let nowhere = RedisAddress::Unix("/nonexistent/redis.sock".into());
        assert!(matches!(
            RedisStore::open(RedisConfig::new(nowhere.clone())),
            Err(StoreError::Remote { .. })
        ));
        for prefix in ["", "a b", "a:b", "*", &"x".repeat(65)] {
            let c = RedisConfig { prefix: prefix.into(), ..RedisConfig::new(nowhere.clone()) };
            assert!(matches!(RedisStore::open(c), Err(StoreError::Io { .. })), "{prefix}");
        }
    }

    #[test]
    fn a_wrong_password_is_an_error_and_the_right_one_works() {
        let Some(server) = start_redis() else { return skip("redis-server") };
        assert_eq!(say(&server, "CONFIG SET requirepass secret"), "+OK\r\n");
        let with = |password: Option<&str>| {
            let c = config(&server, true);
            RedisStore::open(RedisConfig { password: password.map(str::to_owned), ..c })
        };
        assert!(with(None).is_err());
        assert!(with(Some("wrong")).is_err());
        let store = with(Some("secret")).unwrap();
        assert_eq!(store.query(&[key(1)], &Call::unbounded()), [Outcome::Missing]);
        store.close(Instant::now() + Duration::from_secs(10)).unwrap();
    }
}

#[cfg(feature = "object")]
mod bucket {
    use std::path::{Path, PathBuf};
    use std::slice::from_ref;
    use std::time::Duration;

    use sapwood::backend::store::object::{BucketStore, ObjectConfig};
    use sapwood::backend::store::{Call, Health, Outcome, Store, StoreError};

    use super::{Fixture, skip};
    use crate::kit::{Arena, bytes_of, item, key};
    use crate::services::{Server, fresh_name, s3, start_s3};

    const NEEDS: &str = "localbucket (target/l3/bin/localbucket or SAPWOOD_LOCALBUCKET)";

    fn config(server: &Server) -> ObjectConfig {
        ObjectConfig {
            prefix: fresh_name("test"),
            endpoint: Some(format!("http://127.0.0.1:{}", server.port)),
            credentials: Some(("test".into(), "test".into())),
            allow_http: true,
            ..ObjectConfig::new("pages")
        }
    }

    pub(crate) fn fixture() -> Option<Fixture> {
        let Some(server) = s3() else {
            skip(NEEDS);
            return None;
        };
        let store = BucketStore::open(config(&server)).unwrap();
        Some(Fixture::new(store).keeping(server))
    }

    const LEN: usize = 10_000;

    fn object(server: &Server, prefix: &str, n: u64) -> PathBuf {
        let hex = key(n).hex();
        server.dir.path().join("root/pages").join(prefix).join(&hex[..16]).join(&hex[16..])
    }

    fn changed(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn tampered_objects_are_misses_and_put_aside() {
        let Some(server) = s3() else { return skip(NEEDS) };
        let c = config(&server);
        let store = BucketStore::open(c.clone()).unwrap();
        let a = Arena::new(&store, LEN);
        let changes: [fn(&mut Vec<u8>); 5] =
            [|b| b[5000] ^= 1, |b| b[40] ^= 1, |b| b.push(0), |b| b.truncate(64), |b| b.truncate(200)];
        for (n, change) in (0..).zip(changes) {
            a.write(0, &bytes_of(n, LEN));
            let item = item(n, a.span(0, LEN));
            assert_eq!(store.put(from_ref(&item), &Call::unbounded()), [Outcome::Ok(LEN)]);
            let path = object(&server, &c.prefix, n);
            changed(&path, change);
            assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Corrupt], "{n}");
            assert!(!path.exists());
            assert_eq!(store.get(from_ref(&item), &Call::unbounded()), [Outcome::Missing], "{n}");
        }
        let aside = server.dir.path().join("root/pages").join(&c.prefix).join("bad");
        assert_eq!(std::fs::read_dir(aside).unwrap().count(), 5);
    }

    #[test]
    fn a_server_that_went_away_is_a_failure_and_then_a_timeout_bounded_call() {
        let Some(mut server) = start_s3() else { return skip(NEEDS) };
        let mut c = config(&server);
        (c.retries_max, c.call_max) = (0, Duration::from_secs(30));
        let store = BucketStore::open(c).unwrap();
        let a = Arena::new(&store, LEN);
        server.kill();
        let item = item(1, a.span(0, LEN));
        assert!(matches!(store.put(from_ref(&item), &Call::unbounded())[0], Outcome::Transport(_)));
        assert_eq!(store.health(), Health::Down);
    }

    #[test]
    fn a_server_that_never_answers_costs_the_deadline_and_no_more() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let c = ObjectConfig {
            endpoint: Some(format!("http://{}", listener.local_addr().unwrap())),
            credentials: Some(("test".into(), "test".into())),
            allow_http: true,
            call_max: Duration::from_millis(200),
            retries_max: 0,
            ..ObjectConfig::new("pages")
        };
        let refused = BucketStore::open(c);
        assert!(matches!(refused, Err(StoreError::Timeout | StoreError::Remote { .. })), "{refused:?}");
    }

    #[test]
    fn a_bad_prefix_is_an_error() {
        for prefix in ["", "a/b", "..%", &"x".repeat(65)] {
            let c = ObjectConfig { prefix: prefix.into(), ..ObjectConfig::new("pages") };
            assert!(matches!(BucketStore::open(c), Err(StoreError::Io { .. })), "{prefix}");
        }
    }
}
