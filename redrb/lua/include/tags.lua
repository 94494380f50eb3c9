-- Declared tags: tag:<pool>:<name> sorts the groups that wait in a pool by one tag.
--
-- The score of a number is the number. The score of a string is derived from 56 bits of its SHA-1, and lies
-- between 2^1000 and 2^1016. Every number is nearer to zero (the client checks it), so no range of numbers
-- contains a string. Nothing is stored for a string. docs/contributing/decisions/queries.md says why
-- two strings with the same score do no harm.
--@include task

-- Scores of strings that this script has computed: most groups of a put have the same ones.
local known_scores = {}

-- The score of a string: one of 16 powers of two, times a fraction of 52 bits from 1 to 2. Doubles hold
-- both exactly.
local function string_score(text)
  local score = known_scores[text]
  if not score then
    local digest = redis.sha1hex(text)
    local fraction = 1 + tonumber(string.sub(digest, 1, 13), 16) / 2 ^ 52
    score = fraction * 2 ^ (1000 + tonumber(string.sub(digest, 14, 14), 16))
    known_scores[text] = score
  end
  return score
end

-- The score of a tag's value; nil for no value.
local function tag_score(value)
  return type(value) == 'string' and string_score(value) or value
end

-- Sort groups of a pool by their tags; `all` holds their facts. Groups may have tags that the task does not
-- declare any more.
local function tag_in(pool, names, members, all)
  local added = {}
  for i, facts in ipairs(all) do
    for _, name in ipairs(facts.tags and names or {}) do
      if facts.tags[name] then
        added[name] = added[name] or {}
        table.insert(added[name], tag_score(facts.tags[name]))
        table.insert(added[name], members[i])
      end
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
