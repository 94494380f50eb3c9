-- Commit a staged version, which is the newest then, and delete versions that are no longer kept.
-- KEYS[1] versions
-- ARGV    owner, token, version, keep, max_bytes, elsewhere, kind, base, nbytes, stored, delta, names,
--         full, pieces, manifest
--         keep, max_bytes: see include/retention.lua
--         elsewhere: '1': the chunks are on other nodes, and were checked already
--         the other fields: see include/weights.lua
-- Returns {'ok', created ms}; repeated, it changes nothing more and returns the same
--       | {'fenced'}: another publisher is the owner | {'stale', newest version}: not below this one
--       | {'base', newest version that is no adapter}: the delta or adapter starts from another version
--       | {'gone', keys found}: staged chunks have expired
--@include weights retention permissions

check_permissions(pins)
begin_writing()
local owner, token, version = ARGV[1], ARGV[2], tonumber(ARGV[3])
local keep, max_bytes, elsewhere = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local kind, base, full, pieces = ARGV[7], tonumber(ARGV[8]), ARGV[13], ARGV[14]

local last = newest()
local earlier = at(version)
if earlier and earlier.token == token and redis.call('HGET', manifests, ARGV[3]) == ARGV[15] then
  return {'ok', earlier.created_ms}
end
if not is_owner(owner) then
  return {'fenced'}
end
if redis.call('HGET', fence, 'owner') ~= owner or redis.call('HGET', fence, 'token') ~= token then
  return {'gone', 0} -- the server lost its data, or its last second, before it was restarted
end
if last and last.version >= version then
  return {'stale', last.version}
end

if elsewhere then
  for token_of_keys in string.gmatch(full .. ';' .. pieces, '(%d+) %d+ %d+') do
    if redis.call('SISMEMBER', dropped, token_of_keys) == 1 then
      return {'gone', 0}
    end
  end
end

local anchor = kind == 'full' and version or 0
if base > 0 then
  local stands_on = kind == 'lora' and at(base) or newest_state()
  if not stands_on or stands_on.version ~= base or stands_on.kind == 'lora' then
    return {'base', stands_on and stands_on.version or 0}
  end
  anchor = anchor > 0 and anchor or stands_on.anchor
end

if not elsewhere then
  local names = add_keys(add_keys({}, 'chunk', full), 'delta', pieces)
  local found = on_keys('EXISTS', names)
  if found < #names then
    return {'gone', found}
  end
  on_keys('PERSIST', names)
end
local created_ms = string.format('%.0f', server_ms())
redis.call('HSET', manifests, ARGV[3], ARGV[15])
redis.call('XADD', versions, ARGV[3] .. '-0', 'kind', kind, 'token', token, 'base', ARGV[8],
  'anchor', string.format('%.0f', anchor), 'nbytes', ARGV[9], 'stored', ARGV[10],
  'delta', ARGV[11], 'names', ARGV[12], 'created_ms', created_ms, 'full', full, 'pieces', pieces)

local names = forget(keep, max_bytes)
if elsewhere then
  redis.call('SADD', prefix .. 'unsettled', ARGV[3])
  for _, name in ipairs(names) do
    redis.call('SADD', prefix .. 'trash', string.sub(name, #prefix + 1))
  end
else
  on_keys('UNLINK', names)
end
return {'ok', created_ms}
