-- Find how a reader gets to a version, and keep what it needs from being deleted meanwhile.
-- KEYS[1] versions
-- ARGV    reader; version of the state that it has, 0 for none; version wanted, 0 for the newest
--         if that is not the next; version that it uses, and when that was created (0: not known);
--         milliseconds after which a reader
--         that says nothing is forgotten
-- Returns {} when there is no such version, else a list of steps to it, each
--         {version, how, created ms, manifest}. How is 'full', 'delta', 'lora', or 'same' for a
--         state that the reader has.
--@include weights

local reader, have, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[6])
local wanted, used = tonumber(ARGV[3]), tonumber(ARGV[4])
local target
if wanted > 0 then
  target = at(wanted)
else
  target = newest()
end
if not target then
  return {}
end
if wanted == 0 and target.version == used and (ARGV[5] == '0' or target.created_ms == ARGV[5]) then
  return {}
end
local state = target
if target.kind == 'lora' then
  state = target.base > 0 and at(target.base) or nil
  if target.base > 0 and not state then -- what it belongs to is gone
    return {}
  end
end

local function has_delta(entry)
  return entry and entry.kind ~= 'lora' and entry.base > 0 and entry.base < entry.version
end

-- the way by differences from what the reader has
local chain, bytes = {}, 0
local entry = state
while have > 0 and entry and entry.version > have and has_delta(entry) do
  table.insert(chain, 1, {entry, 'delta'})
  bytes = bytes + entry.delta
  entry = at(entry.base)
end
local by_delta = have > 0 and entry and entry.version == have

-- the way from a full version
if state and not (by_delta and #chain == 0) then
  local anew, all = {}, 0
  entry = state
  while entry and entry.kind == 'delta' and has_delta(entry) do
    table.insert(anew, 1, {entry, 'delta'})
    all = all + entry.delta
    entry = at(entry.base)
  end
  if entry and entry.kind == 'full' then
    table.insert(anew, 1, {entry, 'full'})
    all = all + entry.nbytes
  else
    anew = nil
  end
  if not by_delta or (anew and all < bytes) then
    chain = anew
  end
  if not chain then
    return {}
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

begin_writing()
redis.call('HSET', pins, reader,
  string.format('%.0f %.0f %.0f', chain[1][1].version, target.version, now_ms() + ttl_ms))
local steps = {}
for index, step in ipairs(chain) do
  local version = string.format('%.0f', step[1].version)
  steps[index] = {step[1].version, step[2], step[1].created_ms or '',
    redis.call('HGET', manifests, version) or ''}
end
return steps
