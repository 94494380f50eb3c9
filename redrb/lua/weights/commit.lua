-- Commit a prepared version, which is the newest then, and delete versions that are no longer kept.
-- KEYS[1] versions
-- ARGV    owner, token, version, keep, max_bytes, kind, base, nbytes, stored, delta, names, full, pieces,
--         manifest
--         keep, max_bytes: see include/retention.lua
--         the other fields: see include/weights.lua
-- Returns {'ok', created ms, more, after, whether the trash has keys}: with more = 1, weights/trim goes on
--         after that entry; repeated, it changes nothing more and returns the same time
--       | {'fenced'}: another publisher is the owner | {'stale', newest version}: not below this one
--       | {'base', newest version that is no adapter}: the delta or adapter starts from another version
--       | {'gone'}: a newer attempt has begun, or this one was dropped; prepare it again
--@include weights retention permissions

check_permissions(pins)
check_keys()
begin_writing()
local owner, token, version = ARGV[1], ARGV[2], tonumber(ARGV[3])
local keep, max_bytes, kind, base = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])

local last = newest()
local earlier = at(version)
if earlier and earlier.token == token and redis.call('HGET', manifests, ARGV[3]) == ARGV[14] then
  return {'ok', earlier.created_ms, 1, '0-0', 0} -- the caller trims, if it is the owner yet
end
if not is_owner(owner) then
  return {'fenced'}
end
if redis.call('HGET', fence, 'owner') ~= owner or redis.call('HGET', fence, 'token') ~= token
    or not redis.call('HGET', attempts, token) then
  return {'gone'} -- or the server lost its data, or its last second, before it was restarted
end
if last and last.version >= version then
  return {'stale', last.version}
end

local anchor = kind == 'full' and version or 0
if base > 0 then
  local stands_on = kind == 'lora' and at(base) or newest_state()
  if not stands_on or stands_on.version ~= base or stands_on.kind == 'lora' then
    return {'base', stands_on and stands_on.version or 0}
  end
  anchor = anchor > 0 and anchor or stands_on.anchor
end

if not last then
  redis.call('UNLINK', loads, fulls)
  redis.call('HSET', fence, 'first', ARGV[3])
  last = {ordinal = 0, all_bytes = 0, state_bytes = 0}
end
local created_ms = string.format('%.0f', server_ms())
redis.call('HSET', manifests, ARGV[3], ARGV[14])
redis.call('XADD', versions, ARGV[3] .. '-0', 'kind', kind, 'token', token, 'base', ARGV[7],
  'anchor', string.format('%.0f', anchor), 'nbytes', ARGV[8], 'stored', ARGV[9],
  'delta', ARGV[10], 'names', ARGV[11], 'created_ms', created_ms, 'full', ARGV[12], 'pieces', ARGV[13],
  'ordinal', string.format('%.0f', last.ordinal + 1),
  'all_bytes', string.format('%.0f', last.all_bytes + ARGV[9]),
  'state_bytes', string.format('%.0f', last.state_bytes + (kind == 'lora' and 0 or ARGV[9])))
redis.call('ZADD', loads, kind == 'lora' and ARGV[7] or ARGV[3], ARGV[3])
if kind == 'full' then
  redis.call('ZADD', fulls, ARGV[3], ARGV[3])
end
redis.call('HDEL', attempts, token)
return {'ok', created_ms, trim(keep, max_bytes, '0-0')}
