-- Find the steps by which a reader gets to a version, and pin the versions that they need. Some pins that
-- are over, of readers that have died, are removed.
-- KEYS[1] versions
-- ARGV    the call `FindSteps` of redrb/weights/wire/calls.py
-- Returns the steps, and behind them the manifest of each; or, if there is no way to the newest version, the
-- version on this way that is gone
--@include weights permissions

local ask, none = cmsgpack.unpack(ARGV[1]), cmsgpack.pack({})
local have, wanted = ask.have, ask.wanted
local target
if wanted > 0 then
  target = at(wanted)
else
  target = newest()
end
if not target then
  return none
end
if wanted == 0 and target.version == ask.used
    and (ask.created_ms == 0 or tonumber(target.created_ms) == ask.created_ms) then
  return none
end

-- There is no way: a version that it needs is gone. What the newest version needs is not deleted.
local function no_way(version)
  if wanted > 0 and newest().version ~= target.version then
    return none
  end
  return {cmsgpack.pack({{version = string.format('%.0f', version), how = 'gone', created_ms = ''}}), ''}
end

local state = target
if target.kind == 'lora' then
  state = target.base > 0 and at(target.base) or nil
  if target.base > 0 and not state then
    return no_way(target.base)
  end
end

local function has_delta(entry)
  return entry and entry.kind ~= 'lora' and entry.base > 0 and entry.base < entry.version
end

-- steps by deltas from the state that the reader has
local chain, bytes = {}, 0
local entry = state
-- bound: kept versions, of which each is older
while have > 0 and entry and entry.version > have and has_delta(entry) do
  table.insert(chain, 1, {entry, 'delta'})
  bytes = bytes + entry.delta
  entry = at(entry.base)
end
local by_delta = have > 0 and entry and entry.version == have

-- steps from a full version
if state and not (by_delta and #chain == 0) then
  local from_full, all, below = {}, 0, state.version
  entry = state
  -- bound: kept versions, of which each is older
  while entry and entry.kind == 'delta' and has_delta(entry) do
    table.insert(from_full, 1, {entry, 'delta'})
    all, below = all + entry.delta, entry.base
    entry = at(entry.base)
  end
  if entry and entry.kind == 'full' then
    table.insert(from_full, 1, {entry, 'full'})
    all = all + entry.nbytes
  else
    from_full = nil
  end
  if not by_delta or (from_full and all < bytes) then
    chain = from_full
  end
  if not chain then
    return no_way(below)
  end
end
if not state then
  chain = {}
elseif #chain == 0 then
  chain = {{state, 'same'}}
end
if target.kind == 'lora' then
  chain[#chain + 1] = {target, 'lora'}
end

check_permissions(pins)
begin_writing()
local now = server_ms()
redis.call('HSET', pins, ask.reader,
  string.format('%.0f %.0f %.0f %.0f', chain[1][1].version, target.version, now + ask.ttl_ms, ask.ttl_ms))
local looked = redis.call('HRANDFIELD', pins, PAGE.old_pins, 'WITHVALUES')
for i = 1, #looked, 2 do
  if tonumber(string.match(looked[i + 1], '(%d+) %d+$') or '0') < now then
    redis.call('HDEL', pins, looked[i])
  end
end
local steps, reply = {}, {}
for index, step in ipairs(chain) do
  local version = string.format('%.0f', step[1].version)
  steps[index] = {version = version, how = step[2], created_ms = step[1].created_ms or ''}
  reply[index + 1] = redis.call('HGET', manifests, version) or ''
end
reply[1] = cmsgpack.pack(steps)
return reply
