-- Declared tags: tag:<pool>:<name> sorts the groups that wait in a pool by one tag.
--
-- The score of a number is the number. Strings are numbered from 1 in the hash terms, by
-- "<name>\n<string>", and the n-th has the score n * 1e300. Every number is nearer to zero (the client
-- checks it), so no range of numbers contains a string. There is room for 179 million strings.
--@include task

-- Scores of strings that this script has looked up: most groups of a put have the same ones.
local known_terms = {}

-- The score of a string; nil if it is unknown and not to be created.
local function term(name, text, create)
  local terms, field = key('terms'), name .. '\n' .. text
  if known_terms[terms .. field] then
    return known_terms[terms .. field]
  end
  local found = redis.call('HGET', terms, field)
  if not found and create then
    found = redis.call('HLEN', terms) + 1
    redis.call('HSET', terms, field, found)
  end
  known_terms[terms .. field] = found and tonumber(found .. 'e300') or nil
  return known_terms[terms .. field]
end

-- The score of a tag's value; nil for no value, and for a string that no group has had.
local function tag_score(name, value, create)
  if type(value) == 'string' then
    return term(name, value, create)
  end
  return value
end

-- Number the strings among the tags of groups that enter no pool yet.
local function number_strings(all)
  for _, facts in ipairs(all) do
    for name, value in pairs(facts.tags or {}) do
      tag_score(name, value, true)
    end
  end
end

-- Sort groups of a pool by their tags; `all` holds their facts.
local function tag_in(pool, members, all)
  local added = {}
  for i, facts in ipairs(all) do
    for name, value in pairs(facts.tags or {}) do
      added[name] = added[name] or {}
      table.insert(added[name], tag_score(name, value, true))
      table.insert(added[name], members[i])
    end
  end
  for name, scores in pairs(added) do
    in_parts('ZADD', key('tag', pool .. ':' .. name), scores)
  end
end

-- Remove groups of a pool from the sorted sets of its tags.
local function tag_out(pool, names, members)
  for _, name in ipairs(names) do
    in_parts('ZREM', key('tag', pool .. ':' .. name), members)
  end
end
