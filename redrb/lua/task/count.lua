-- Count the groups that wait in one status, for one consumer group. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Count` of redrb/stream/task/calls.py
-- Returns its reply. With the status archived the history counts, too.
--@include task facts tags where plan

local ask = cmsgpack.unpack(ARGV[1])
local group, status, where = ask.group, ask.status, ask.where
local pool, rule = pool_of(group, status), rules()
local joined = redis.call('SISMEMBER', key('groups'), group) == 1
if not exists() then
  return cmsgpack.pack({found = 0})
end
local root = where ~= '' and cjson.decode(where)
if root and joined then
  return cmsgpack.pack({found = count_where(pool, rule.names, root)})
end
local kept = 0
if status == 'archived' and not root and ask.place == '0' then
  kept = redis.call('ZCARD', key('archive'))
end
if joined then
  return cmsgpack.pack({found = redis.call('ZCARD', key('ready', pool)) + kept})
end

local page, members = redis.call('HSCAN', key('facts'), ask.place, 'COUNT', PAGE.counted), {}
local query = root and resolve(rule.names, root)
for i = 1, #page[2], 2 do
  local facts = unpack_facts(page[2][i + 1])
  for _, leaf in ipairs(query and query.leaves or {}) do
    leaf.scores = {tag_score(facts.tags and facts.tags[leaf.tag])}
  end
  if facts.status == status and (not query or satisfies(query.root, 1)) then
    members[#members + 1] = page[2][i]
  end
end
local found = #members
for first = 1, #members, PAGE.arguments do
  local last = math.min(first + PAGE.arguments - 1, #members)
  for _, at in ipairs(redis.call('ZMSCORE', key('archive'), unpack(members, first, last))) do
    found = found - (at and 1 or 0)
  end
end
return cmsgpack.pack({found = found + kept, place = page[1]})
