//! Names of nodes: `host:port` and `[v6]:port`.

use std::fmt::{self, Display};
use std::net::Ipv6Addr;

use crate::error::NodeError;

/// A host and a port, not yet resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// A name, an IPv4 address, or an IPv6 address without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Address {
    /// Reads `host:port` or `[v6]:port`. Port 0 is an address to listen on, not to open.
    pub(crate) fn parse(input: &str) -> Result<Self, NodeError> {
        let refuse = |reason| NodeError::BadAddress { input: input.to_owned(), reason };
        let (host, port) = input.rsplit_once(':').ok_or_else(|| refuse("it has no port"))?;
        let host = match host.strip_prefix('[') {
            Some(bracketed) => {
                let host = bracketed
                    .strip_suffix(']')
                    .ok_or_else(|| refuse("its brackets do not match"))?;
                let (address, zone) = host.split_once('%').unwrap_or((host, "0"));
                address
                    .parse::<Ipv6Addr>()
                    .map_err(|_| refuse("its brackets hold no IPv6 address"))?;
                if !is_name(zone) {
                    return Err(refuse("its IPv6 zone is none"));
                }
                host
            }
            None if host.contains(':') => return Err(refuse("IPv6 needs brackets")),
            None if !is_name(host) => return Err(refuse("its host is no name")),
            None => host,
        };
        // `parse` alone would take a sign.
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let port = digits.then(|| port.parse().ok()).flatten();
        Ok(Self {
            host: host.to_owned(),
            port: port.ok_or_else(|| refuse("its port is not a number up to 65535"))?,
        })
    }

    /// [`parse`](Self::parse) for an address to connect to.
    pub(crate) fn of_peer(input: &str) -> Result<Self, NodeError> {
        let address = Self::parse(input)?;
        if address.port == 0 {
            return Err(NodeError::BadAddress {
                input: input.to_owned(),
                reason: "nobody listens on port 0",
            });
        }
        Ok(address)
    }
}

impl Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

fn is_name(host: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    !host.is_empty() && host.len() <= 253 && host.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_ports_are_read_and_written_back() {
        for (input, host, port) in [
            ("node-7.example:15428", "node-7.example", 15428),
            ("10.0.0.1:1", "10.0.0.1", 1),
            ("localhost:65535", "localhost", 65535),
            ("[::1]:9", "::1", 9),
            ("[fe80::1%lo]:9", "fe80::1%lo", 9),
            ("[::ffff:127.0.0.1]:9", "::ffff:127.0.0.1", 9),
        ] {
            let address = Address::of_peer(input).unwrap();
            assert_eq!((address.host.as_str(), address.port), (host, port), "{input}");
            assert_eq!(address.to_string(), input);
        }
    }

    /// FAILURES.md B42.
    #[test]
    fn everything_else_is_refused_and_quoted() {
        for input in [
            "",
            "host",
            "host:",
            ":9",
            ":",
            "::1",
            "[::1]",
            "[::1]9",
            "[::1",
            "::1]:9",
            "[]:9",
            "[host]:9",
            "[::1%]:9",
            "[[::1]]:9",
            "::ffff:127.0.0.1",
            "a:b:c",
            "host:0",
            "host:65536",
            "host:-1",
            "host:+9",
            "host:9x",
            "9x",
            "host: 9",
            "ho st:9",
            " host:9",
            "host:9 ",
            "http://host:9",
            "user@host:9",
            "hôte:9",
            "host:\u{663}",
            "\0:9",
        ] {
            let error = Address::of_peer(input).expect_err(input);
            assert!(error.to_string().contains(&format!("{input:?}")), "{input:?}: {error}");
        }
        assert_eq!(Address::parse("host:0").unwrap().port, 0, "to listen on");
    }
}
