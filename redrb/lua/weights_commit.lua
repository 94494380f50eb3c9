-- Make a staged version the newest, for good, and evict those beyond the last `keep`.
-- KEYS[1] versions
-- ARGV    owner, token, version, chunks, keep, kind, manifest
-- Returns {'ok', created ms} | {'fenced'} | {'stale', newest version} | {'gone', chunks found};
--         the same call again changes nothing and returns {'ok', created ms}.
--@ _weights

begin_writing()
local owner, token, version = ARGV[1], ARGV[2], ARGV[3]
local chunks, keep = tonumber(ARGV[4]), tonumber(ARGV[5])
local earlier = committed(token, version)
if earlier then
  return {'ok', field(earlier, 'created_ms')}
end
if redis.call('HGET', fence, 'owner') ~= owner or redis.call('HGET', fence, 'token') ~= token then
  return {'fenced'}
end
if newest() >= tonumber(version) then
  return {'stale', newest()}
end
local found = on_chunks('EXISTS', token, version, chunks)
if found < chunks then
  return {'gone', found}
end

for index = 0, chunks - 1 do
  redis.call('PERSIST', prefix .. 'chunk:' .. token .. ':' .. version .. ':' .. index)
end
local time = redis.call('TIME')
local created_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('XADD', versions, version .. '-0', 'kind', ARGV[6], 'token', token, 'chunks', ARGV[4],
  'created_ms', created_ms, 'manifest', ARGV[7])

local excess = redis.call('XLEN', versions) - keep
if excess > 0 then
  for _, entry in ipairs(redis.call('XRANGE', versions, '-', '+', 'COUNT', excess)) do
    on_chunks('UNLINK', field(entry, 'token') or '', string.match(entry[1], '^%d+'),
      tonumber(field(entry, 'chunks')) or 0)
    redis.call('XDEL', versions, entry[1])
  end
end
return {'ok', created_ms}
