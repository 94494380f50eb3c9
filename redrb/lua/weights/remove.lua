-- Delete all versions. Whoever is publishing is fenced, and tokens are not given twice: of these keys
-- the fence stays.
-- KEYS[1] versions
-- ARGV    owner, which is nobody's; elsewhere ('1': chunks are on other nodes, and are put into trash)
-- Returns {last token that was given, versions that were deleted...}; the same call again deletes
--         what was committed since.
--@include weights

begin_writing()
redis.call('HSET', fence, 'owner', ARGV[1])
local told, names = {tonumber(redis.call('HGET', fence, 'token') or 0)}, {}
for _, found in ipairs(redis.call('XRANGE', versions, '-', '+')) do
  local entry = parsed(found)
  told[#told + 1] = entry.version
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
return told
