// A js-libp2p node that does what lines of JSON on standard input say, one after the other, and answers each by a line.
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { generateKeyPair } from '@libp2p/crypto/keys'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { peerIdFromString } from '@libp2p/peer-id'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import * as digest from 'multiformats/hashes/digest'

// Node 20 has no such function yet, and js-libp2p calls it.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new Promise((...both) => { [resolve, reject] = both })
  return { promise, resolve, reject }
}

const PIECE = new Uint8Array(60_000)
const MAX_STREAMS = 2_000
let node

async function receive (stream) {
  let size = 0
  const first = []
  for await (const data of stream) {
    size += data.byteLength
    if (first.length < 64) first.push(...data.subarray().slice(0, 64))
  }
  return { size, text: new TextDecoder().decode(new Uint8Array(first)) }
}

async function send (stream, size) {
  for (let left = size; left > 0; left -= PIECE.length) {
    if (!stream.send(PIECE.subarray(0, Math.min(left, PIECE.length)))) await stream.onDrain()
  }
}

const cid = hex => CID.createV1(0x55, digest.create(0x12, Uint8Array.from(Buffer.from(hex, 'hex'))))
const open = (address, protocol) => node.dialProtocol(multiaddr(address), protocol, {
  runOnLimitedConnection: true, maxOutboundStreams: MAX_STREAMS, signal: AbortSignal.timeout(60_000)
})

const commands = {
  async start ({ keyType, kad, listen, isRelay }) {
    const services = { identify: identify(), ping: ping({ runOnLimitedConnection: true }) }
    if (kad) services.dht = kadDHT({ protocol: kad, clientMode: false, peerInfoMapper: passthroughMapper })
    if (isRelay) services.relay = circuitRelayServer()
    node = await createLibp2p({
      privateKey: await generateKeyPair(keyType ?? 'Ed25519'),
      addresses: { listen: ['/ip4/127.0.0.1/tcp/0', ...(listen ?? [])] },
      transports: [tcp(), circuitRelayTransport()],
      connectionEncrypters: [noise()],
      streamMuxers: [yamux()],
      connectionGater: { denyDialMultiaddr: () => false },
      services
    })
    const options = { maxInboundStreams: MAX_STREAMS, maxOutboundStreams: MAX_STREAMS, runOnLimitedConnection: true }
    await node.handle('/interop/echo', async stream => {
      for await (const data of stream) if (!stream.send(data)) await stream.onDrain()
      await stream.close()
    }, options)
    await node.handle('/interop/source', async stream => {
      await send(stream, 64 * 1024 * 1024)
      await stream.close()
    }, options)
    await node.handle('/interop/reset', async stream => {
      for await (const data of stream) return stream.abort(new Error(`${data.byteLength} bytes are enough`))
    }, options)
    return { peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) }
  },
  async addresses () { return { addresses: node.getMultiaddrs().map(String) } },
  async dial ({ address }) {
    const conn = await node.dial(multiaddr(address), { signal: AbortSignal.timeout(20_000) })
    return { remote: conn.remotePeer.toString() }
  },
  async identify ({ peer }) {
    const found = await node.peerStore.get(peerIdFromString(peer))
    const text = name => new TextDecoder().decode(found.metadata.get(name))
    return { agent: text('AgentVersion'), version: text('ProtocolVersion'), protocols: found.protocols }
  },
  async ping ({ address }) { return { milliseconds: await node.services.ping.ping(multiaddr(address)) } },
  async send ({ address, size }) {
    const stream = await open(address, '/interop/sink')
    const answer = receive(stream)
    await send(stream, size)
    await stream.close()
    return await answer
  },
  async receive ({ address }) { return await receive(await open(address, '/interop/source')) },
  async reset ({ address }) {
    const stream = await open(address, '/interop/reset')
    stream.send(PIECE)
    try { return { error: null, ...await receive(stream) } } catch (error) { return { error: String(error) } }
  },
  async streams ({ address, number, atOnce }) {
    let answered = 0
    const one = async () => {
      const stream = await open(address, '/interop/echo')
      const answer = receive(stream)
      stream.send(new Uint8Array(100))
      await stream.close()
      if ((await answer).size === 100) answered++
    }
    for (let done = 0; done < number; done += atOnce) {
      await Promise.all(Array.from({ length: Math.min(atOnce, number - done) }, one))
    }
    return { answered }
  },
  async provide ({ key }) { await node.contentRouting.provide(cid(key), { signal: AbortSignal.timeout(20_000) }); return {} },
  async providers ({ key }) {
    const found = []
    for await (const peer of node.contentRouting.findProviders(cid(key), { signal: AbortSignal.timeout(20_000) })) {
      found.push(peer.id.toString())
    }
    return { found: [...new Set(found)] }
  },
  async find ({ peer }) {
    const found = await node.peerRouting.findPeer(peerIdFromString(peer), { signal: AbortSignal.timeout(20_000) })
    return { addresses: found.multiaddrs.map(String) }
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...settings } = JSON.parse(line)
  try {
    console.log(JSON.stringify({ ok: await commands[command](settings) }))
  } catch (error) {
    console.log(JSON.stringify({ error: `${error}` }))
  }
}
process.exit(0)
