-- Delete all versions. Current publishers are fenced. The key `fence` stays, so that no token is given
-- twice.
-- KEYS[1] versions
-- ARGV    name, elsewhere
--         name: a new one, which no publisher has
--         elsewhere: '1': the chunks are on other nodes; their names are put into the set trash
-- Returns {last token that was given, deleted version ...}; repeated, it deletes versions committed since
--@include weights permissions

check_permissions(pins)
begin_writing()
take_over(ARGV[1])
local reply, names = {tonumber(redis.call('HGET', fence, 'token') or 0)}, {}
for _, found in ipairs(redis.call('XRANGE', versions, '-', '+')) do -- bound: kept versions, and pinned ones
  local entry = parsed(found)
  reply[#reply + 1] = entry.version
  add_keys(names, 'chunk', entry.full)
  add_keys(names, 'delta', entry.pieces)
end
if ARGV[2] == '1' then
  for _, name in ipairs(names) do
    redis.call('SADD', prefix .. 'trash', string.sub(name, #prefix + 1))
  end
else
  on_keys('UNLINK', names)
end
redis.call('UNLINK', versions, manifests, pins, dropped, prefix .. 'unsettled', prefix .. 'followers')
return reply
