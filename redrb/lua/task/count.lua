-- Count the groups that wait in one status, for one consumer group. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Count` of redrb/stream/task/calls.py
-- Returns its reply
--@include task facts tags where plan

local ask = cmsgpack.unpack(ARGV[1])
local group, status, where = ask.group, ask.status, ask.where
local pool, rule = pool_of(group, status), rules()
local joined = redis.call('SISMEMBER', key('groups'), group) == 1
if not exists() then
  return cmsgpack.pack({found = 0})
end
local root = where ~= '' and cjson.decode(where)
if joined then
  local found = root and count_where(pool, rule.names, root) or redis.call('ZCARD', key('ready', pool))
  return cmsgpack.pack({found = found})
end

local page, found = redis.call('HSCAN', key('facts'), ask.place, 'COUNT', PAGE.counted), 0
local query = root and resolve(rule.names, root)
for i = 1, #page[2], 2 do
  local facts = unpack_facts(page[2][i + 1])
  for _, leaf in ipairs(query and query.leaves or {}) do
    leaf.scores = {tag_score(facts.tags and facts.tags[leaf.tag])}
  end
  if facts.status == status and (not query or satisfies(query.root, 1)) then
    found = found + 1
  end
end
return cmsgpack.pack({found = found, place = page[1]})
