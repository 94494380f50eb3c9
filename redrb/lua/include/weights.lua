-- The keys, versions and chunks of published weights; every script of weights includes this.
--
-- KEYS[1] is the stream of versions; its ids are <version>-0. All other keys share its prefix and
-- with it its hash tag; keys of chunks are derived here, as a version may have thousands.
-- fence is a hash: owner, "<microseconds> <name>" of the publisher that may publish, and when it took over;
-- token, a number for each attempt; first, the first version of the window (include/retention.lua).
-- manifests is a hash: version -> manifest. pins is a hash: reader -> "<low> <high> <deadline> <ttl>".
-- loads is a sorted set: versions of the window by the state that each loads: an adapter's base (0: none),
-- else the version itself. fulls is a sorted set: versions that are stored in full.
-- attempts is a hash: token of an attempt -> 'keys <range>;...': its keys, which expire no more, until it is
-- committed. trash is a set of ranges whose keys are to be deleted.
-- asked is a stream, of one entry at most: the damaged version that a reader has found last; the kind of
-- version that readers wait for; and the damaged key. The next one of this kind, or a full one, ends it.
-- A range is "chunk <token> <first> <count>" or "delta <token> <first> <count>"; it names the keys
-- chunk:<token>:<n> and delta:<token>:<n>. Clients keep and delete keys, as they may be on other nodes.
--
-- Fields of an entry: kind; token of the attempt; base, the version that its delta starts from (of
-- an adapter: the one that it belongs to), 0 for none; anchor, the full version that a new reader
-- starts from, 0 for none; nbytes of the state; stored bytes; delta bytes; names, number of tensors;
-- created_ms; full and pieces, its keys, as "<token> <first> <count>;..."; ordinal, how many versions there
-- were with it; all_bytes and state_bytes, stored bytes of it and all before it, and without adapters.

local versions = KEYS[1]
local prefix = string.sub(versions, 1, -9)
local fence = prefix .. 'fence'
local manifests = prefix .. 'manifests'
local pins = prefix .. 'pins'
local loads = prefix .. 'loads'
local fulls = prefix .. 'fulls'
local attempts = prefix .. 'attempts'
local trash = prefix .. 'trash'
local asked = prefix .. 'asked'

local NUMBERS = {'base', 'anchor', 'nbytes', 'stored', 'delta', 'ordinal', 'all_bytes', 'state_bytes'}

local function parsed(entry)
  local fields = {id = entry[1], version = tonumber(string.match(entry[1], '^%d+'))}
  for i = 1, #entry[2], 2 do
    fields[entry[2][i]] = entry[2][i + 1]
  end
  for _, name in ipairs(NUMBERS) do
    fields[name] = tonumber(fields[name]) or 0
  end
  return fields
end

local function at(version)
  local id = string.format('%.0f-0', version)
  local found = redis.call('XRANGE', versions, id, id)[1]
  return found and parsed(found)
end

local function newest()
  local found = redis.call('XREVRANGE', versions, '+', '-', 'COUNT', 1)[1]
  return found and parsed(found)
end

-- The newest state that a version of the window loads.
local function newest_state()
  local found = redis.call('ZREVRANGE', loads, 0, 0, 'WITHSCORES')
  return found[2] and at(tonumber(found[2]))
end

-- The kind of version that a reader has asked for, or nil.
local function asked_kind()
  local found = redis.call('XREVRANGE', asked, '+', '-', 'COUNT', 1)[1]
  return found and found[2][4]
end

local MOST_TOKENS = 1e15 -- numbers below 2^53 are exact

-- A token that Redis can count on from, or -1.
local function token_of(text)
  local number = tonumber(string.match(text or '', '^%d+$') or '-1')
  return number <= MOST_TOKENS and number or -1
end

-- Let the keys from number `first` to the one before `beyond` be deleted.
local function discard_keys(kind, token, first, beyond)
  if first < beyond then
    redis.call('SADD', trash, string.format('%s %s %.0f %.0f', kind, token, first, beyond - first))
  end
end

-- Let the keys of an attempt be deleted that is not committed.
local function discard_attempt(stored)
  for kind, token, first, count in string.gmatch(stored, '(%a+) (%d+) (%d+) (%d+)') do
    discard_keys(kind, token, tonumber(first), tonumber(first) + tonumber(count))
  end
end

-- Let the keys of all attempts be deleted: none of them can be committed any more.
local function discard_attempts()
  local noted = redis.call('HGETALL', attempts) -- bound: attempts
  for i = 2, #noted, 2 do -- bound: attempts
    discard_attempt(noted[i])
  end
  redis.call('DEL', attempts)
end

local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- When a publisher took over, 0 for none.
local function since(owner)
  return tonumber(string.match(owner or '', '^(%d+) ')) or 0
end

-- Whether a publisher is the owner, or is to be: a server that lost its data has none, or an earlier one.
local function is_owner(owner)
  local stored = redis.call('HGET', fence, 'owner')
  return stored == owner or since(stored) < since(owner)
end

-- Make `name` the owner, later than the owner before.
local function take_over(name)
  local time, stored = redis.call('TIME'), redis.call('HGET', fence, 'owner') or ''
  if string.match(stored, '^%d+ (.*)$') == name then
    return stored
  end
  local owner = string.format('%.0f %s', math.max(time[1] * 1000 * 1000 + time[2], since(stored) + 1), name)
  redis.call('HSET', fence, 'owner', owner)
  return owner
end

-- Read a number of each key, so that a key of another type ends the script before it has written anything.
local function check_keys()
  redis.call('XLEN', versions)
  redis.call('XLEN', asked)
  redis.call('SISMEMBER', trash, '')
  for _, name in ipairs({fence, manifests, pins, attempts}) do
    redis.call('HLEN', name)
  end
  for _, name in ipairs({loads, fulls}) do
    redis.call('ZCARD', name)
  end
end

-- Begin to write: at the memory limit a script may write only after a command that can free memory, such
-- as this DEL.
local function begin_writing()
  redis.call('DEL', prefix .. 'none')
end
